"""Parts of the user's own: what a block can have beside attention, MLP, norms and skips.

A part is an object, given as `Architecture(..., parts=(mine,))`. It stands at one place of the
traversal and brings a rule per arithmetic, a method of that arithmetic's name:

| place           | x, in the plain arithmetic                                |
|-----------------|-----------------------------------------------------------|
| `attention_in`  | tokens as attention meets them, before the norm it has    |
| `cross_in`      | the same of cross-attention                               |
| `mlp_in`        | the same of the MLP                                       |
| `read`          | tokens as a branch reads them, after that norm            |
| `values`        | what heads mix, `[batch, head, token, head_width]`        |
| `pattern`       | the attention matrix P, `[batch, head, token, token]`     |
| `heads`         | the outputs of heads, `[batch, token, head, head_width]`  |
| `attention`     | what attention adds, before a norm, as tokens             |
| `cross`         | the same of cross-attention                               |
| `mlp`           | what the MLP adds, before a norm, as tokens               |
| `attention_sum` | what attention adds and the skip, before a norm on both   |
| `stream`        | the tokens after the block                                |

    plain(x, block, rules, inside)       on ordinary tensors; every part has this one
    deviation(x, block, rules, inside)   on states; without it `measure` runs in float64, with a note
    mean_field(x, block, rules, inside)  on covariances of tokens, and `closed_form` on numbers (`forecasts/`); without
                                         one forecasts refuse the network
    frozen(x, block, rules, inside)      on terms of paths, `x.parts` linear in x; without it paths refuse the
                                         network, but for `pattern`, which is kept as measured; parts at
                                         `values` and `heads` they always refuse

A part that has tensors of its own, trained with the rest, gives their initial values in each layer,

    initial(arch, layer, generator)      by name, float64; drawn from the generator where they are random

and finds them in `block.weights.parts[its name]`. One that stands at several places has no place and no
rules, but `pieces`, the parts that it is at each of them. One that reads masks from `rules.settings` has
`sees = True`: then whole masks are made, however long the context. One that acts by the number of a layer, or by the
depth, has `by_number = True`: then no layer can be taken out (`Transformer.without`).

`block` is the layer (`block.index`, `block.weights`, `block.arch`), `rules` the arithmetic with its
`settings` (masks, positions, which tokens are valid) and a dict `carried` of what one layer leaves to later ones,
`inside` what the branch reads. What a rule named `frozen` needs of the tokens as they were, the plain rule
keeps, `rules.keep(block, name, x)`, and it finds with `rules.kept(block, name)`. To have heaviest paths
proved, such a part has `lengthens(block)`: by how much it can lengthen a term at most.
"""

from collections.abc import Iterable
from typing import Any, Literal, Protocol, get_args, runtime_checkable

Place = Literal[
    "attention_in", "cross_in", "mlp_in", "read", "values", "pattern", "heads", "attention", "cross", "mlp",
    "attention_sum", "stream",
]  # fmt: skip
PLACES = get_args(Place)


@runtime_checkable
class Part(Protocol):
    """A part of the user's own: hashable, with the name that files call it."""

    name: str
    place: Place

    def plain(self, x: Any, block: Any, rules: Any, inside: Any) -> Any:
        """Return x as the part changes it, on ordinary tensors."""


@runtime_checkable
class Several(Protocol):
    """A part that stands at several places."""

    name: str

    @property
    def pieces(self) -> tuple[Part, ...]:
        """The parts that it consists of, each at its own place."""


def pieces(parts: Iterable[Part | Several]) -> tuple[Part, ...]:
    """Return every part at its one place: those that stand at several are taken apart."""
    return tuple(piece for part in parts for piece in getattr(part, "pieces", (part,)))
