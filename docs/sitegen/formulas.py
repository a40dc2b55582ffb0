"""Formulas as docstrings and pages write them, `||A||_F <= sqrt(n) sum_j |P_ij|`, as TeX.

Only what is a formula through and through is taken for one: numbers, letters, the functions below, operators
with spaces around them. What holds any other word (`measure(net, X)`, `relative_mu`) is code, and stays so.
"""

import re

GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν",
    "rho": "ρ", "sigma": "σ", "tau": "τ", "theta": "θ", "omega": "ω", "eta": "η", "pi": "π", "psi": "ψ",
    "chi": "χ", "xi": "ξ", "zeta": "ζ",
}  # fmt: skip
FUNCTIONS = ("log", "exp", "max", "min", "cos", "sin", "tanh", "sinh", "cosh", "dim", "arccos")
"""TeX knows these by their names; those below are set upright."""
UPRIGHT = (
    "res", "rank", "mean", "softmax", "osc", "range", "diag", "sd", "var", "act", "norm", "close", "past",
    "expm1", "log1p", "Attn", "Norm", "MLP", "SA", "Lip", "sigmoid", "argmin", "load", "erf", "erfc",
    "std", "median", "row", "LN",
)  # fmt: skip
NAMED = {
    **{name: rf"\{name}" for name in (*GREEK, *FUNCTIONS)},
    **{name: rf"\mathrm{{{name}}}\," for name in UPRIGHT},
    "eps": r"\varepsilon",
    "inf": r"\infty",
    "sum": r"\sum",
    "prod": r"\prod",
    "gain": r"\mathrm{gain}",
}
SYMBOLS = {
    **{each: each for each in "|+-/=<>:;()[]'!"},
    ",": ", ", "<=": r"\le ", ">=": r"\ge ", "!=": r"\ne ", "->": r"\to ", "<-": r"\leftarrow ", "||": r"\|",
    "...": r"\ldots ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "→": r"\to ", "←": r"\leftarrow ",
    "‖": r"\|", "…": r"\ldots ", "·": r"\cdot ", "*": r"\cdot ", "×": r"\times ", "−": "-", "∞": r"\infty ",
    "Σ": r"\sum ", "Π": r"\prod ", "∂": r"\partial ", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ",
    "⌋": r"\rfloor ", "½": r"\tfrac{1}{2} ", "≈": r"\approx ", "∈": r"\in ", "⊥": r"\perp ",
}  # fmt: skip
LETTERS = {
    **{letter: rf"\{name} " for name, letter in GREEK.items()},
    **{"ε": r"\varepsilon ", "µ": r"\mu ", "φ": r"\varphi ", "Φ": r"\Phi ", "Δ": r"\Delta ", "ℓ": r"\ell "},
}
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ᵀˢᴸᵏⁱⁿʳᵗˡ", "0123456789+-()TsLkinrtl", strict=True))
LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ᵢⱼₖₙₕₗₜ", "0123456789+-ijknhlt", strict=True))
TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<number>\d+(?:\.\d+)?)|(?P<symbol><=|>=|!=|->|<-|\|\||\.\.\.)"
    r"|(?P<word>log1p|expm1|[A-Za-z]+\d?)|(?P<mark>.)",
    re.DOTALL,
)
TELLING = re.compile(r" (<=|>=|!=|[=<>≤≥≠+\-−/·×→←]) |\|\||‖|\^|\bsqrt\b|\bsum[ _]|√|Σ|Π|[⁰-⁹²³ᵀˢ]")
"""What makes a line of letters a formula: an operator between spaces, a norm, a power, a root or a sum."""
ENGLISH = ("or", "of", "is", "at", "by", "to", "if", "no", "in", "on", "as", "an", "it", "we", "so", "be", "do")
PYTHON = re.compile(r""""|'\w+'|`|\w=\S|\w\.[A-Za-z]|\w\[["\w]+\]|__|^--?\w|\bfor\b|\bin\b|\bif\b""")


def tex(text: str, words: bool = False) -> str | None:
    """The formula in TeX; None where the text is no formula. With `words`, other words are set as text.

    >>> tex("||X||_F^2 <= n max_ij |X_ij|")
    '\\\\|X\\\\|_{F}^{2} \\\\le  n \\\\max_{ij} |X_{ij}|'
    >>> tex("measure(net, X)") is None
    True
    """
    if not words and (not TELLING.search(text) or PYTHON.search(text)):
        return None
    found = _Reader(text, words).all()
    return None if found is None else re.sub(r" {2,}", "  ", found).strip()


class _Reader:
    """Reads a formula from left to right."""

    def __init__(self, text: str, words: bool) -> None:
        self.tokens = [(str(match.lastgroup), match.group()) for match in TOKEN.finditer(text)]
        self.at, self.words = 0, words

    def all(self) -> str | None:
        """All of it; None where something is no part of a formula."""
        parts = []
        while self.at < len(self.tokens):
            part = self.one()
            if part is None:
                return None
            parts.append(part)
        return "".join(parts)

    def one(self) -> str | None:
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "space":
            return r"\ " if self.words else r"\quad " if len(text) > 2 else " "
        if text in ("sqrt", "√"):
            return self.root()
        if text in "_^" and kind == "mark":
            return self.script(text)
        if text in RAISED or text in LOWERED:
            return self.small(text)
        if kind == "number":
            return text
        if kind == "word":
            return self.word(text)
        if text in "{}":
            return "\\" + text
        if text == "*" and self.at > 1 and self.tokens[self.at - 2][0] == "word":  # j*
            return "^{*}"
        return SYMBOLS.get(text) or LETTERS.get(text) or (r"\%" if text == "%" and self.words else None)

    def word(self, text: str) -> str | None:
        if text in NAMED:
            scripted = self.next() in {"_", "^", *RAISED, *LOWERED}
            return NAMED[text].removesuffix(r"\,") if scripted else NAMED[text] + " "
        if text == "floor":
            inside = self.group()
            return None if inside is None else rf"\lfloor {inside}\rfloor "
        if len(text) == 1:
            return text
        letter, digit = text[:-1], text[-1]
        if len(text) == 2 and digit.isdigit():
            return f"{letter}_{digit}"
        if len(text) == 2 and not self.words and text.lower() not in ENGLISH:
            return " ".join(text)
        return rf"\text{{{text}}}" if self.words else None

    def next(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def root(self) -> str | None:
        """sqrt(...), sqrt d."""
        while self.next().isspace():
            self.at += 1
        bracketed, inside = self.next() in ("(", "{"), self.group()
        while inside is not None and not bracketed and self.next() in ("_", "^"):
            mark = self.next()
            self.at += 1
            inside += self.script(mark) or ""
        return None if inside is None else rf"\sqrt{{{inside}}}"

    def script(self, mark: str) -> str | None:
        """What stands above or below; T above is the transpose."""
        inside = self.group()
        if inside is None:
            return None
        inside = inside.strip() + self.further() if mark == "_" else inside.strip()
        if mark == "^" and self.next() in LOWERED and self.next():  # e^Dᵢⱼ
            self.at += 1
            inside += self.small(self.tokens[self.at - 1][1])
        return mark + "{" + (r"\mathsf{T}" if inside == "T" and mark == "^" else inside) + "}"

    def small(self, first: str) -> str:
        """A run of raised or lowered letters."""
        table, mark = (RAISED, "^") if first in RAISED else (LOWERED, "_")
        found = table[first]
        while self.next() in table and self.next():
            found += table[self.next()]
            self.at += 1
        found += self.further() if mark == "_" else ""
        if mark == "_" and self.starred():
            self.at, found = self.at + 1, found + "*"
        return mark + "{" + (r"\mathsf{T}" if found == "T" and mark == "^" else found) + "}"

    def starred(self) -> bool:
        """Whether a star follows that multiplies nothing: pⱼ*."""
        after = self.tokens[self.at + 1][0] if self.at + 1 < len(self.tokens) else "space"
        return self.next() == "*" and after not in ("word", "number")

    def further(self) -> str:
        """More of what stands below: `W_QK,h`, `A_1,inf`, `E_ij'`."""
        found = ""
        while self.next() in (",", "'"):
            if self.next() == "'":
                self.at, found = self.at + 1, found + "'"
                if re.fullmatch(r"[a-z]{1,2}", self.next()):
                    self.at, found = self.at + 1, found + self.next()
                continue
            after = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else ("space", " ")
            if after[1] != "∞" and (after[0] != "word" or len(after[1]) > 3):
                break
            self.at += 1
            found += "," + str(self.group())
        return found

    def group(self) -> str | None:
        """What is in brackets, without them, or one thing."""
        if self.at >= len(self.tokens):
            return None
        kind, text = self.tokens[self.at]
        closing = {"(": ")", "{": "}", "⌊": "⌋"}.get(text)
        if closing is None:
            self.at += 1
            if text == "floor":
                return self.word(text)
            if kind == "word" and text not in NAMED:
                return text if len(text) <= 3 else rf"\mathrm{{{text}}}"
            if kind == "word":
                return NAMED[text].strip()
            if text == "-" and self.at < len(self.tokens):
                after = self.group()
                return None if after is None else f"-{after}"
            return text if kind == "number" else LETTERS.get(text, SYMBOLS.get(text))
        self.at += 1
        parts: list[str] = []
        depth = 1
        while self.at < len(self.tokens):
            here = self.next()
            depth += (here == text) - (here == closing)
            if depth == 0:
                self.at += 1
                inside = "".join(parts)
                return rf"\lfloor {inside}\rfloor " if text == "⌊" else inside
            part = self.one()
            if part is None:
                return None
            parts.append(part)
        return None
