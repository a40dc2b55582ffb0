"""The folder that a command writes to, locked from its beginning to its end, and tables that only a report needs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rankscope.cli.app import ending
from rankscope.cli.show import progress
from rankscope.errors import FileError

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure
    from torch import Tensor

    from rankscope.nets import Transformer
    from rankscope.profiles import Reader
    from rankscope.runs import Store

Result = TypeVar("Result")
MOST_VARIANTS = 4  # Variants that a report draws; the whole network is among them


def open_store(folder: Path | None) -> "Store | None":
    """Open and lock the run folder; None where nothing is to be written.

    A folder that cannot be written, or that another process writes, is refused before hours of work.
    """
    from rankscope.runs import Store

    if folder is not None:
        require_report()
    return None if folder is None else ending.enter_context(Store(folder))


def require_same_network(
    store: "Store | None", entry: str, nets: "Mapping[str, Transformer]", fields: Mapping[str, Any]
) -> None:
    """Refuse a folder that holds another network's results, with which one report would mix those of `nets`.

    `fields` are those of the manifest that name the model. Results that the same command, `entry`, wrote earlier are
    not looked at: they are replaced.
    """
    from rankscope.report import network_name, same_network
    from rankscope.runs import Manifest, Network

    manifests = {} if store is None else {name: of for name, of in store.run.manifests.items() if name != entry}
    if store is None or not manifests:
        return
    networks = tuple(
        Network(variant=name, fingerprint=net.fingerprint, architecture=net.arch.to_dict())
        for name, net in nets.items()
    )
    now = Manifest(networks=networks).adding(**fields)
    for name, before in manifests.items():
        if not same_network(before, now):
            held = f"{store.folder} holds {name} of {network_name(before) or 'another network'}"
            written = f" ({before.command})" if before.command else ""
            sentence = f"{held}{written}; this is of {network_name(now) or 'another'}, and a report must not mix them"
            raise FileError(f"{sentence}: give another folder with -o", subject="output")


def require_report(what: str = "a folder with figures and a report", *also: str) -> None:
    """Refuse to begin unless the packages of a report, and those in `also`, are installed."""
    from rankscope.extras import need

    need(what, *also, "matplotlib", "PIL", "jinja2", "plotly")


def write_figures(store: "Store", figures: "Mapping[str, Figure]") -> None:
    """Write figures and the report of what a folder holds."""
    from rankscope.figures import save
    from rankscope.report import write_report

    for name, figure in figures.items():
        save(figure, store.folder / name)
    write_report([store.folder], store.folder / "report.html")


def with_manifest(result: Result, **fields: Any) -> Result:
    """A profile, summary or certificates with these fields added to its manifest."""
    untyped: Any = result
    return replace(untyped, manifest=untyped.manifest.adding(**fields))


def where_written(output: Path | None) -> str:
    """Where the finished part of an interrupted command is."""
    return "nothing is written without -o" if output is None else f"these are written to {output}"


class ReportTables:
    """Reads the token cloud and the singular values, which the report draws, of a few of the variants.

    `words` are those of the first text in `X`, which the cloud shows; without them it shows the numbers of tokens.
    """

    def __init__(
        self,
        net: "Transformer",
        variants: Sequence[str],
        X: "Tensor",
        padding: "Tensor",
        words: list[list[str]] | None = None,
    ) -> None:
        from rankscope.profiles import ShapeReader, SpectrumReader

        chosen = list(variants)[:MOST_VARIANTS]
        if "transformer" in variants and "transformer" not in chosen:
            chosen[-1] = "transformer"
        self.net, self.X, self.padding, self.words = net, X, padding, words
        self._shapes = {name: ShapeReader(samples=1) for name in chosen}
        self._spectra = {name: SpectrumReader(name, samples=2) for name in chosen}

    def readers(self, variant: str) -> "Sequence[Reader]":
        """Readers for the pass over a variant in deviation arithmetic; none if it is not drawn."""
        return [readers[variant] for readers in (self._shapes, self._spectra) if variant in readers]

    def read_alone(self, quiet: bool) -> None:
        """Run a pass for the readers alone, where nothing else is measured in deviation arithmetic."""
        from rankscope.profiles import one_pass

        with progress(quiet) as start:
            start("token cloud, singular values")
            for name in self._shapes:
                net = self.net.variant(name)
                one_pass(net, self.X[:2], self.padding[:2], self.readers(name))

    def tables(self) -> "dict[str, pl.DataFrame]":
        """The tables `cloud` and `spectrum`."""
        import polars as pl

        from rankscope.profiles import cloud_table

        shapes = {name: reader.result() for name, reader in self._shapes.items()}
        return {
            "cloud": cloud_table(shapes, ~self.padding[:1], self.words),
            "spectrum": pl.concat([reader.result() for reader in self._spectra.values()]),
        }
