"""Trained models that come with rankscope: their names, where they lie, and images that they were not trained on.

A shipped model is a folder of Hugging Face directories `checkpoint-N`, snapshots along its training. Its name stands
for the last one; any of them is named like a folder, `digit-vit/checkpoint-640`. These folders lie in `data/models`;
those of the package rankscope-models, where that is installed, are added to them: the other snapshots of `moby-gpt`,
which are 30 MB. Importing this imports no torch:
`load` (`sources/loading.py`) and the command line (`cli/options.py`, `cli/inputs.py`) ask for names and folders;
`rankscope.sources` has `held_out_images`.
"""

import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rankscope.errors import FileError, SourceError
from rankscope.naming import forgiven, path_exists

if TYPE_CHECKING:
    from torch import Tensor

MORE_SNAPSHOTS = "rankscope_models"  # The package that carries further snapshots


class HeldOutImages(NamedTuple):
    """Images that a model was not trained on, and what they show."""

    pixel_values: "Tensor"  # `[image, channel, y, x]`, as the model takes them
    labels: "Tensor"  # `[image]`, which of its classes each image is of


def shipped_models() -> dict[str, dict[int, Path]]:
    """The folder of each snapshot of each shipped model, by training step."""
    spec = find_spec(MORE_SNAPSHOTS)
    more = [] if spec is None else list(spec.submodule_search_locations or [])
    folders: dict[str, dict[int, Path]] = {}
    for root in (str(files("rankscope").joinpath("data/models")), *more):
        for folder in Path(root).glob("*/checkpoint-*"):
            if (folder / "config.json").is_file() and (match := re.fullmatch(r"checkpoint-(\d{1,15})", folder.name)):
                folders.setdefault(folder.parent.name, {})[int(match[1])] = folder
    return {name: dict(sorted(steps.items())) for name, steps in sorted(folders.items())}


def shipped_names() -> tuple[str, ...]:
    """The names of the shipped models."""
    return tuple(shipped_models())


def shipped_model(name: str) -> str | None:
    """The shipped model that a name means, or means a snapshot of. None for any other name, and where there is a
    folder of the model's name: that folder is meant.

    >>> shipped_model("Digit_ViT"), shipped_model("digit-vit/checkpoint-640"), shipped_model("google/vit")
    ('digit-vit', 'digit-vit', None)
    """
    first, names = name.partition("/")[0], shipped_names()
    known = forgiven(first, names)
    return known if known in names and not path_exists(first) and name.rstrip("/").count("/") < 2 else None


def shipped_folder(name: str) -> Path | None:
    """The folder of a shipped model's last snapshot, or of the one that the name says; None for any other name."""
    model = shipped_model(name)
    if model is None:
        return None
    snapshots = {folder.name: folder for folder in shipped_models()[model].values()}
    snapshot = name.rstrip("/").partition("/")[2] or [*snapshots][-1]
    if snapshot not in snapshots:
        sentence = f"{model} has no snapshot {snapshot!r}; it has {', '.join(snapshots)}"
        if find_spec(MORE_SNAPSHOTS) is None:
            sentence += "; more come with a package of their own: pip install ./packages/rankscope-models in a clone"
        raise SourceError(sentence, subject="source")
    return snapshots[snapshot]


def held_out_images(model: str) -> HeldOutImages | None:
    """Images that a shipped model of images was not trained on, and their labels; None for any other model.

    >>> images = held_out_images("digit-vit")
    >>> images.pixel_values.shape, images.labels.unique().tolist()
    (torch.Size([100, 1, 8, 8]), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    import numpy as np
    import torch

    path = files("rankscope").joinpath("data/models", model, "held_out.npz")
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            # Pixels are whole numbers from 0 to 16; the model takes -1 to 1.
            pixels, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
            return HeldOutImages(pixels[:, None].double() / 8 - 1, labels.long())
    except (OSError, ValueError, KeyError) as error:
        raise FileError(
            f"the images of {model} cannot be read ({error}): install rankscope again", subject=model
        ) from error
