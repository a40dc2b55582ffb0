"""What a model may be called: names known here, with case and hyphens forgiven, and ids on the hub.

A name is judged here before a hub is asked, so that a slip of the pen is answered at once.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

HOME = "https://huggingface.co"
ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")  # An id on the hub: its owner, a slash, its name
OWNERLESS = frozenset(files("rankscope").joinpath("data/ownerless_models.txt").read_text(encoding="utf-8").split())
"""Models of the hub's first years have no owner in their id; no others do."""


def forgiven(name: str, known: Iterable[str]) -> str:
    """The known name that equals this one but for case, hyphens, underscores and spaces.

    If there is none, or a file or folder has this name, it is the name itself.

    >>> [forgiven(name, ["minilm", "gpt2"]) for name in ("MiniLM", "GPT-2", "mine")]
    ['minilm', 'gpt2', 'mine']
    """
    names = list(known)
    if name in names or name in OWNERLESS or path_exists(name):
        return name
    return {_bare(candidate): candidate for candidate in names}.get(_bare(name), name)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one, if any is like it.

    >>> nearest("Bert-Bse", ["bert-base", "gpt2"])
    'bert-base'
    """
    bare = {_bare(candidate): candidate for candidate in known}
    close = get_close_matches(_bare(name), bare, n=1)
    return bare[close[0]] if close else None


def may_be_on_hub(name: str, cache_dir: str | Path | None = None) -> bool:
    """True if a name has the shape of an id on the hub: owner/name, or a name of the hub's first years.

    A hub of one's own (HF_ENDPOINT) may have other names, and so may models in the cache.

    >>> [may_be_on_hub(name) for name in ("google/bert", "bert-base-uncased", "bert-bse", "./runs/mine")]
    [True, True, False, False]
    """
    if name in OWNERLESS or ID.fullmatch(name) is not None:
        return True
    if is_path(name) or not name or find_spec("huggingface_hub") is None:
        return False
    from huggingface_hub import constants

    kept = Path(cache_dir or constants.HF_HUB_CACHE) / f"models--{name}"
    return hub_address() != HOME or path_exists(str(kept))


def hub_address() -> str:
    """Where the hub is: Hugging Face's own, or the one that HF_ENDPOINT names."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def is_path(name: str) -> bool:
    """True if a name is written as a path: from a root, from here, or through several folders.

    >>> is_path("./mine"), is_path("runs/a/checkpoint-10"), is_path("google/bert")
    (True, True, False)
    """
    return name.startswith((".", "~", "/")) or "\\" in name or name.count("/") > 1 or name.endswith("/")


def _bare(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).casefold()


def path_exists(name: str) -> bool:
    """True if there is a file or folder of this name."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long for a path, or with a null in it
        return False
