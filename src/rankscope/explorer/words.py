"""The page's own words: what a reader sees of a setting, in place of the names that programs have for it."""

import re

RANDOM = "of the random network"
CONTROLS = {
    "model": "the model", "text": "the text", "tokens": "the number of tokens", "skip": "the skip weight",
    "mlp": "the MLP", "norm": "the norm", "mask": "the mask", "window": "the window",
    "divisor": "the score divisor", "temperature": "the temperature", "layers": "the depth",
    "remedies": "the remedies", "shape": "the shape of the random network",
    "shape.layers": f"the number of layers {RANDOM}", "shape.width": f"the width {RANDOM}",
    "shape.heads": f"the number of heads {RANDOM}", "shape.seed": f"the seed {RANDOM}",
    "shape.init": f"the weights {RANDOM}", "shape.mlp": f"the MLP {RANDOM}",
    "shape.norm": f"the norm {RANDOM}", "shape.place": f"the place of the norm {RANDOM}",
    "shape.positions": f"the positions {RANDOM}", "shape.parallel": f"parallel branches {RANDOM}",
}  # fmt: skip
"""What a control of the page is called in a sentence."""
PARTS = {
    "attention_skip": "the skip around attention", "mlp_skip": "the skip around the MLP",
    "norm_place": "the place of the norm", "head_width": "the width of a head",
    "mlp_width": "the width of the MLP", "key_heads": "the number of key heads",
}  # fmt: skip
"""Fields of an architecture of which its errors speak."""
_NAME = re.compile(r"'[^']*'|\"[^\"]*\"|\b[a-z]+(?:_[a-z]+)+\b")


def control(place: tuple[int | str, ...]) -> str:
    """What a reader calls that place of a request.

    >>> control(("setting", "shape", "width")), control(("A", "skip"))
    ('the width of the random network', 'the skip weight of pin A')
    """
    steps = [str(step) for step in place if step not in ("setting", "parts")]
    pin = steps.pop(0) if steps[:1] in (["A"], ["B"]) else ""
    name = ".".join(steps)
    said = CONTROLS.get(name, name.replace("_", " ")) or "a request"
    return f"{said} of pin {pin}" if pin else said


def in_words(sentence: str) -> str:
    """A sentence without names of fields; what stands in quotes stays as it is.

    >>> in_words("norm_place must be 'post'; got 'a_b'")
    "the place of the norm must be 'post'; got 'a_b'"
    """

    def said(found: re.Match[str]) -> str:
        word = found[0]
        return word if word[0] in "'\"" else PARTS.get(word, word.replace("_", " "))

    return _NAME.sub(said, sentence)
