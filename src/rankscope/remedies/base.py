"""What a remedy is, and what one that has a name says of itself."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Remedy(Protocol):
    """A change that goes onto a network. One of your own is any object with these two."""

    @property
    def name(self) -> str:
        """What files and messages call it; each name goes onto a network once."""

    def applied(self, arch: Any) -> Any:
        """Return the architecture with the remedy: other fields, or a part more (`nets/parts.py`)."""


class TheoryNote(NamedTuple):
    """What theory says of a remedy.

    `order` is m in `r' = k r^m`, the relative residual after a layer by that before it, both small, of a
    network *without skips*. Tokens are a common one c and deviations of size r. Scores `x_i A x_j` vary with
    i and j together only through `r_i A r_j`, which is of size r^2; what depends on j alone is common to all
    rows. Rows of attention therefore differ by r^2, and applied to values that differ by r they leave r^3:
    the logarithm triples in every layer (Dong et al. 2021). Whatever brings a larger term in lowers m."""

    order: int | None  # m; None where nothing is left of tokens without skips
    sentence: str
    source: str
    branch: str = "1"  # The weight of a branch beside its skip, as a formula of L (depth), in post-norm networks
    branch_weight: Callable[[int], float] = lambda depth: 1.0  # The same as a function
    layer_weight: Callable[[int, int], float] | None = None
    """(l, L) to the factor on what branches of layer l (from 1) add in a pre-norm network of depth L at its
    start, where depth alone decides it."""


HALF = "1/2", lambda depth: 0.5
"""The last two fields of a `TheoryNote` where attention's branch is halved at the start."""
ClaimTest = Literal["order", "slower", "deeper", "lower", "higher", "learns", "lasting", "spread_out"]
"""How a claim is tried (`rankscope_studies.remedies`): the law of collapse without skips is that of plain attention
(`order`), falls more slowly (`slower`); tokens stay apart for more layers (`deeper`); a quantity of trained
networks is lower or higher than without the remedy; deep networks learn (`learns`); a quantity does not
vanish (`lasting`); entropy of attention stays up (`spread_out`)."""


class Claim(NamedTuple):
    """One thing that was published of a remedy, and how it is tried."""

    what: str
    published: str
    test: ClaimTest
    settings: tuple[str, ...] = ()  # The networks that it is tried on: pre, post, no skips
    quantity: str = ""  # What is compared, where the test compares a quantity


class NamedRemedy:
    """A remedy that is known by name, as `contranorm:s=0.1`: a built-in one, or one of a plugin.

    Each is a frozen dataclass of its numbers. Those that are parts of a block are parts themselves; tensors
    that are trained lie with the weights of each layer under `parts.NAME`.
    """

    name: ClassVar[str]
    formula: ClassVar[str] = ""  # What it does, in one line
    citation: ClassVar[str] = ""
    family: ClassVar[Literal["attention", "scores", "branches", "values"]]  # What of a block it changes
    zero: ClassVar[Mapping[str, float]] = {}  # The numbers at which it changes nothing; empty where there are none
    by_number: ClassVar[bool] = False  # Whether it acts by the number of a layer or by the depth of the network
    sets_skip: ClassVar[bool] = False  # Whether it decides the weight of a skip
    theory: ClassVar[TheoryNote]
    claims: ClassVar[tuple[Claim, ...]] = ()

    def applied(self, arch: Any) -> Any:
        """Return the architecture with this part as its last."""
        return arch.replace(parts=(*arch.parts, self))

    def tensors(self, arch: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a network that gets the remedy; most remedies change none."""
        return state

    def spec(self) -> str:
        """Return the remedy as the command line and files write it: `contranorm:s=0.1`."""
        numbers: Any = fields(self) if is_dataclass(self) else ()
        written = ",".join(f"{field.name}={getattr(self, field.name)!r}" for field in numbers)
        return f"{self.name}:{written}" if written else self.name
