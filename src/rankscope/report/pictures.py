"""Pictures of a study, small enough to be put into a page."""

import base64
import io
from pathlib import Path

WIDTH, COLOURS = 1100, 96
"""Pixels across, and colours kept: line drawings need few."""


def data_uri(path: Path, width: int = WIDTH) -> str | None:
    """The PNG as text, no wider than `width`; None where there is none that can be read."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # as a damaged file makes it
        return None
    if picture.width > width:
        picture = picture.resize(
            (width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS
        )
    buffer = io.BytesIO()
    picture.quantize(COLOURS).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
