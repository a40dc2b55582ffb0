"""ContraNorm: tokens are pushed away from those that point as they do.

    X <- (1 + s) X - s S X,    S = softmax(Xh Xh^T),    Xh the tokens at length one

S has no divisor, and a token takes part in its own row; one of length zero stays zero. Rows of
`(1 + s) I - s S` sum to one, as the paper's formula has it (two of the published files drop the `+ s`). The
published S is over all tokens, padding included; here it is over what each token sees by the layer's mask.

| norm_place    | where it stands                                                                     |
|---------------|-------------------------------------------------------------------------------------|
| post          | on the sum of attention and its skip, before the norm (what its authors chose for BERT) |
| pre, sandwich | before the norm that each branch reads through, inside the branch (their DeiT)      |

It stands there where norms are taken out as well. The final norm, which their DeiT has it in too, is left.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankscope.nets.norms import UNWEIGHTED, normalise
from rankscope.nets.parts import Place
from rankscope.nets.remedies.remedy import Built
from rankscope.shapes import Float

Tokens = Float[Tensor, "batch token width"]


@dataclass(frozen=True)
class ContraNorm(Built):
    """ContraNorm (Guo et al. 2023). The number is fixed; its authors tried 1e-4 to 0.2."""

    s: float = 0.1
    name: ClassVar[str] = "contranorm"
    says: ClassVar[str] = "tokens become (1 + s) X - s softmax(Xh Xh^T) X, by their norms"
    source: ClassVar[str] = "Guo et al. 2023"
    zero: ClassVar[dict[str, float]] = {"s": 0.0}

    @property
    def pieces(self) -> tuple["Contrast", ...]:
        """Before every norm that it may stand before."""
        places: tuple[Place, ...] = ("attention_in", "cross_in", "mlp_in", "attention_sum")
        return tuple(Contrast(self.name, place, self.s) for place in places)


@dataclass(frozen=True)
class Contrast:
    """It, at one place."""

    name: str
    place: Place
    s: float
    sees: ClassVar[bool] = True

    def stands(self, block: Any) -> bool:
        """Whether this is its place, by where the network has its norms."""
        return bool((block.arch.norm_place == "post") == (self.place == "attention_sum"))

    def plain(self, X: Tokens, block: Any, rules: Any, inside: Any) -> Tokens:
        """`X + s (X - S X)`."""
        if not self.stands(block):
            return X
        unit = normalise(X, "scale", UNWEIGHTED, 0.0)
        visible = rules.settings.visible[block.arch.mask_of(block.index)][:, 0]
        S = (unit @ unit.mT).masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)  # of padding
        rules.keep(block, f"{self.name} {self.place}", S)
        return X + self.s * (X - S @ X)

    def frozen(self, terms: Any, block: Any, rules: Any, inside: Any) -> Any:
        """With S as it was."""
        if not self.stands(block):
            return terms
        Y, S = terms.parts, rules.kept(block, f"{self.name} {self.place}")
        return terms._replace(parts=Y + self.s * (Y - S @ Y))
