"""Pictures of a study, small enough to be put into a page."""

import base64
from pathlib import Path

WIDTH, COLOURS = 1100, 256
"""Pixels across, and colours kept: with fewer, lines of rare colours take those of others."""


def data_uri(path: Path, width: int = WIDTH) -> str | None:
    """The PNG as text, no wider than `width`; None where there is none that can be read."""
    from rankscope.figures.matplotlib import Image, png

    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # as a damaged file makes it
        return None
    if picture.width > width:
        height = round(picture.height * width / picture.width)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    return f"data:image/png;base64,{base64.b64encode(png(picture, COLOURS)).decode()}"
