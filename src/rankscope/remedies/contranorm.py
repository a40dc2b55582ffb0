"""ContraNorm (Guo et al. 2023): tokens are pushed away from those that point as they do.

    X <- (1 + s) X - s S X,    S = softmax(Xh Xh^T),    Xh the tokens at length one

S has no divisor, and a token takes part in its own row; one of length zero stays zero. Rows of
`(1 + s) I - s S` sum to one, as the paper's formula has it (two of the published files drop the `+ s`). The
published S is over all tokens, padding included; here it is over what each token sees by the layer's mask.

| norm_place    | where it stands                                                                     |
|---------------|-------------------------------------------------------------------------------------|
| post          | on the sum of attention and its skip, before the norm (what its authors chose for BERT) |
| others        | before the norm that each branch reads through, if any, inside the branch (their DeiT) |

It stands there where norms are taken out as well. The final norm, which their DeiT has it in too, is left.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankscope.remedies.base import Claim, NamedRemedy, TheoryNote
from rankscope.shapes import Float

Tokens = Float[Tensor, "batch token width"]


@dataclass(frozen=True)
class ContraNorm(NamedRemedy):
    """`(1 + s) X - s S X` before norms. The number is fixed; its authors tried 1e-4 to 0.2."""

    s: float = 0.1
    name: ClassVar[str] = "contranorm"
    formula: ClassVar[str] = "tokens become (1 + s) X - s softmax(Xh Xh^T) X, by their norms"
    citation: ClassVar[str] = "Guo et al. 2023"
    family: ClassVar[Any] = "values"
    zero: ClassVar[dict[str, float]] = {"s": 0.0}
    theory = TheoryNote(
        3,
        "(1 + s) I - s S multiplies deviations by about 1 + s and leaves the common token: a factor in "
        "front of r^3, and in a whole network (1 + s) against each layer's fall.",
        "Guo et al. 2023; derived here",
    )
    claims = (
        Claim("tokens stay apart for more layers", "Guo et al. 2023: it keeps collapse off", "deeper", ("post", "pre")),
        Claim(
            "better in training",
            "Guo et al. 2023: GLUE 82.59 to 83.54, DeiT-24 76.76 to 81.28",
            "higher",
            ("post", "pre"),
            "accuracy",
        ),
    )

    @property
    def pieces(self) -> tuple["TokenContrast", ...]:
        """One before every norm that it may stand before."""
        sites = ("attention_in", "cross_in", "mlp_in", "attention_sum")
        return tuple(TokenContrast(self.name, site, self.s) for site in sites)


@dataclass(frozen=True)
class TokenContrast:
    """ContraNorm at one place of a block."""

    name: str
    place: str
    s: float
    sees: ClassVar[bool] = True

    def applies(self, block: Any) -> bool:
        """True if it stands at this place, by where the network has its norms."""
        return bool((block.arch.norm_place == "post") == (self.place == "attention_sum"))

    def plain(self, X: Tokens, block: Any, rules: Any, inside: Any) -> Tokens:
        """`X + s (X - S X)`."""
        if not self.applies(block):
            return X
        square = X.square().sum(-1, keepdim=True)
        unit = X / square.masked_fill(square == 0, 1.0).sqrt()
        visible = rules.settings.visible[block.arch.mask_of(block.index)][:, 0]
        S = (unit @ unit.mT).masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)  # of padding
        rules.keep(block, f"{self.name} {self.place}", S)
        return X + self.s * (X - S @ X)

    def deviation(self, state: Any, block: Any, rules: Any, inside: Any) -> Any:
        """S is attention of one head: queries and keys are the tokens at length one, values the tokens."""
        if not self.applies(block):
            return state
        averaged = rules.attend_tokens(rules.unit_tokens(state), state, block)
        x, R = (part * (1 + self.s) + mean * -self.s for part, mean in ((state.x, averaged.x), (state.R, averaged.R)))
        return rules.tidy(replace(state, x=x, R=R))

    def mean_field(self, C: Any, block: Any, rules: Any, inside: Any) -> Any:
        """`M C M^T`, `M = (1 + s) I - s S`, S of the expected cosines."""
        if not self.applies(block):
            return C
        length = C.diagonal(dim1=-2, dim2=-1).clamp(min=1e-300).sqrt()
        visible = rules.settings.visible[block.arch.mask_of(block.index)][:, 0]
        cosines = C / (length[..., None] * length[..., None, :])
        S = cosines.masked_fill(~visible, -torch.inf).softmax(-1)
        M = (1 + self.s) * torch.eye(C.shape[-1]).to(C) - self.s * S
        return M @ C @ M.mT

    def frozen(self, terms: Any, block: Any, rules: Any, inside: Any) -> Any:
        """With S as it was on the tokens."""
        if not self.applies(block):
            return terms
        Y, S = terms.parts, rules.kept(block, f"{self.name} {self.place}")
        return terms._replace(parts=Y + self.s * (Y - S @ Y))
