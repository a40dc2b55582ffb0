"""Names that a shell completes are those there are, and are completed without torch."""

import os
import subprocess
import sys

import pytest

from rankscope.cli import options as names
from tests.cli.running import process
from tests.cli.test_app import commands


def test_the_names_that_shells_complete_are_the_names_there_are() -> None:
    from rankscope.cli import depth
    from rankscope.depths.criteria import CRITERIA
    from rankscope.depths.cut import SEARCHES
    from rankscope.metrics import METRICS
    from rankscope.nets import mask_matrix
    from rankscope.nets.tensors import SCHEMES
    from rankscope.nets.variants import VARIANT_PARTS
    from rankscope.profiles import ARITHMETICS
    from rankscope.remedies import REMEDIES
    from rankscope.sources import PRESETS, fresh
    from rankscope.sources.texts import SPLITS
    from rankscope.theory import THEOREMS
    from rankscope_studies import STUDIES
    from rankscope_studies.commands.shared import FIGURES

    assert tuple(PRESETS) == names.PRESETS
    assert names.PARTS == VARIANT_PARTS and names.SPLITS == SPLITS and tuple(SCHEMES) == names.SCHEMES
    assert tuple(METRICS.shipped) == names.METRICS and tuple(ARITHMETICS) == names.ARITHMETICS
    assert tuple(REMEDIES.shipped) == names.REMEDIES
    assert tuple(CRITERIA) == depth.CRITERIA and depth.SEARCHES == SEARCHES
    assert tuple(THEOREMS) == names.THEOREMS
    studies = [(paper, figure) for paper, figures in FIGURES.items() for figure in figures]
    assert studies == [(study.paper, study.figure) for study in STUDIES]
    net = fresh("bert-tiny")
    for variant in names.VARIANTS:
        net.variant(variant)
    for mask in names.MASKS:
        mask_matrix(mask, 16)


def completed(line: str) -> list[str]:
    """What bash is offered for a line that ends at the cursor, and that torch was not imported for it."""
    code = (
        "import sys\n"
        "from rankscope.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    assert not {'torch', 'polars', 'matplotlib', 'numpy'} & set(sys.modules)\n"
    )
    words = line.split(" ")
    asked = {"_RANKSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_bash_completes_commands_and_names_without_torch() -> None:
    assert completed("rankscope ") == list(commands())
    assert completed("rankscope measure bert-t") == ["bert-tiny"]
    assert set(completed("rankscope measure minilm --variants san,san+m")) == {
        "san,san+mlp", "san,san+mlp_skip",
    }  # fmt: skip
    assert completed("rankscope measure --metrics mu,entr") == ["mu,entropy"]
    assert completed("rankscope paths --mask win") == ["window:1"]
    assert completed("rankscope reproduce dong2021 f") == ["fig2", "fig3", "fig4"]
    assert set(completed("rankscope compare minilm:san+n")) == {
        "minilm:san+norm", "minilm:san+norm+skip", "minilm:san+norm+mlp+mlp_skip",
    }  # fmt: skip
    assert set(completed("rankscope compare minilm : san+norm+s")) == {"san+norm+skip"}


def test_the_completion_script_can_be_shown() -> None:
    shown = process(_RANKSCOPE_COMPLETE="source_bash").stdout
    assert "complete -o default -F _rankscope_completion rankscope" in shown
