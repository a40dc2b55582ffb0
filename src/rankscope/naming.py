"""What a model may be called: names known here, with case and hyphens forgiven, and ids on the hub.

A name is judged here before a hub is asked, so that a slip of the pen is answered at once.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

HOME = "https://huggingface.co"
ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")
"""An id on the hub: its owner, a slash, its name."""
EARLY = {
    "albert": "base large xlarge xxlarge",
    "bert-base": "cased chinese german-cased german-dbmdz-cased german-dbmdz-uncased multilingual-cased "
    "multilingual-uncased uncased cased-finetuned-mrpc",
    "bert-large": "cased uncased cased-whole-word-masking uncased-whole-word-masking "
    "cased-whole-word-masking-finetuned-squad uncased-whole-word-masking-finetuned-squad",
    "distilbert-base": "cased uncased german-cased multilingual-cased cased-distilled-squad "
    "uncased-distilled-squad uncased-finetuned-sst-2-english",
    "gpt2": "medium large xl",
    "roberta": "base large large-mnli base-openai-detector large-openai-detector",
    "t5": "small base large 3b 11b",
    "xlm": "clm-ende-1024 clm-enfr-1024 mlm-100-1280 mlm-17-1280 mlm-en-2048 mlm-ende-1024 mlm-enfr-1024 "
    "mlm-enro-1024 mlm-tlm-xnli15-1024 mlm-xnli15-1024",
    "xlm-roberta": "base large large-finetuned-conll02-dutch large-finetuned-conll02-spanish "
    "large-finetuned-conll03-english large-finetuned-conll03-german",
    "xlnet": "base-cased large-cased",
}
"""Models of the hub's first years have no owner in their id; no others do."""
OWNERLESS = frozenset(
    ["gpt2", "distilgpt2", "distilroberta-base", "openai-gpt", "camembert-base", "ctrl", "transfo-xl-wt103"]
    + [f"{base}-{rest}" for base, every in EARLY.items() if base != "albert" for rest in every.split()]
    + [f"albert-{size}-v{version}" for size in EARLY["albert"].split() for version in (1, 2)]
)


def forgiven(name: str, known: Iterable[str]) -> str:
    """The known name that this one is but for case, hyphens, underscores and spaces; else the name itself,
    as also where a file or folder has it.

    >>> [forgiven(name, ["minilm", "gpt2"]) for name in ("MiniLM", "GPT-2", "mine")]
    ['minilm', 'gpt2', 'mine']
    """
    names = list(known)
    if name in names or name in OWNERLESS or _exists(name):
        return name
    return {_bare(each): each for each in names}.get(_bare(name), name)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one, if any is like it.

    >>> nearest("Bert-Bse", ["bert-base", "gpt2"])
    'bert-base'
    """
    bare = {_bare(each): each for each in known}
    close = get_close_matches(_bare(name), bare, n=1)
    return bare[close[0]] if close else None


def may_be_on_hub(name: str, cache_dir: str | Path | None = None) -> bool:
    """Whether it has the shape of an id on the hub: owner/name, or a name of the hub's first years. A hub of
    one's own (HF_ENDPOINT) may have other names, and what lies in the cache has been there.

    >>> [may_be_on_hub(name) for name in ("google/bert", "bert-base-uncased", "bert-bse", "./runs/mine")]
    [True, True, False, False]
    """
    if name in OWNERLESS or ID.fullmatch(name) is not None:
        return True
    if is_path(name) or not name or find_spec("huggingface_hub") is None:
        return False
    from huggingface_hub import constants

    kept = Path(cache_dir or constants.HF_HUB_CACHE) / f"models--{name}"
    return hub_address() != HOME or _exists(str(kept))


def hub_address() -> str:
    """Where the hub is: Hugging Face's own, or the one that HF_ENDPOINT names."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def is_path(name: str) -> bool:
    """Whether it is written as a path: from a root, from here, or through several folders.

    >>> is_path("./mine"), is_path("runs/a/checkpoint-10"), is_path("google/bert")
    (True, True, False)
    """
    return name.startswith((".", "~", "/")) or "\\" in name or name.count("/") > 1 or name.endswith("/")


def _bare(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).casefold()


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long for a path, or with a null in it
        return False
