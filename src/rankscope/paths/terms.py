"""The frozen arithmetic: every rule is linear, and a state is any number of terms side by side.

`Terms.parts` is `[part, batch, token, width]`; `start` is the part into which biases are added, None to leave
them out. What the parts are depends on the rules: one path (`PathRules`), every way on from a path
(`PathExtensions`), all paths of each length (`polynomials.py`), everything that passes through a layer
(`by_part.py`). `nets/traversal.py` calls these rules; `frozen.py` supplies what was measured.

`path_terms` follows many paths at once: what they have in common at the start is computed once. The theorem's
path takes attention from the full network (`shared`). The code of Dong et al. 2021 runs the path as a network
of its own: one head, or the skip, in every layer, with attention, norms, MLPs and biases computed from what
the path itself has come to (`own`). Those terms do not add up to the output.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.nets import Arithmetic, Block, Branch, Half, Part, PassSettings, Plain, Square, Tokens, traverse
from rankscope.paths.counts import Path
from rankscope.paths.frozen import Frozen, FrozenLayer, Parts, with_bias
from rankscope.shapes import Float

HeadTerms = Float[Tensor, "part batch head token head_width"]


class Terms(NamedTuple):
    """Terms of a network that go through its layers side by side."""

    parts: Parts
    start: int | None = None


class FrozenRules(Arithmetic):
    """Linear rules on the terms of a frozen network, through all active heads or those named by layer."""

    name = "frozen"

    def __init__(self, frozen: Frozen, heads: Sequence[Sequence[int]] | None = None) -> None:
        self.frozen, self.arch, self.heads = frozen, frozen.net.arch, heads
        self.whole = frozen.whole
        self.carried: dict[str, Any] = {}

    def layer(self, block: Block) -> FrozenLayer:
        """The measured quantities of a block."""
        return self.frozen.layers[block.index]

    @cached_property
    def settings(self) -> PassSettings:
        """Masks and positions of the pass, for parts of one's own."""
        return self.frozen.net.settings(self.frozen.X, self.frozen.valid)

    def kept(self, block: Block, name: str) -> Tensor:
        """The tensor that a part's plain rule kept under a name."""
        return self.layer(block).kept[name]

    def active_heads(self, block: Block) -> tuple[int, ...]:
        """The active heads, of those named."""
        active = block.active_heads
        return active if self.heads is None else tuple(h for h in active if h in self.heads[block.index])

    def norm(self, block: Block, name: str, terms: Terms) -> Terms:
        """The norm at the scales it had; its bias starts there."""
        return terms._replace(parts=self.layer(block).norms[name].apply(*terms))

    def values(self, block: Block, terms: Terms) -> Float[Tensor, "part batch token key_head head_width"]:
        """The values that heads mix, per term."""
        w = block.weights.attention.value  # [width, key_head, head_width]
        V = terms.parts @ w.weight.flatten(1)
        V = with_bias(V, terms.start, None if w.bias is None else w.bias.flatten())
        return V.reshape(*V.shape[:-1], *w.weight.shape[1:])

    def pattern(self, block: Block, terms: Terms) -> Square:
        """The attention pattern as it was measured."""
        return self.layer(block).P

    def mix(self, block: Block, P: Square, V: Tensor) -> HeadTerms:
        """The output of each head, per term."""
        group = self.arch.heads // self.arch.key_heads
        V = V.repeat_interleave(group, 3) if group > 1 else V
        # Parts beside each other in the last axis: P multiplies them all at once.
        parts, batch, n, heads, width = V.shape
        side = V.permute(1, 3, 2, 0, 4).reshape(batch, heads, n, parts * width)
        return (P @ side).view(batch, heads, n, parts, width).permute(3, 0, 1, 2, 4)

    def gate(self, block: Block, head_terms: HeadTerms, terms: Terms) -> HeadTerms:
        """The output of each head, times the gates as measured."""
        gate = self.layer(block).head_gate
        assert gate is not None
        return head_terms * gate

    def output(self, block: Block, head_terms: HeadTerms) -> Terms:
        """What heads add to the hidden states; the output bias starts here."""
        return self._started(block, self.added(block, head_terms))

    start: int | None = None  # the part in which an output bias starts: it passes through no head of its layer

    def _started(self, block: Block, parts: Parts) -> Terms:
        return Terms(with_bias(parts, self.start, block.weights.attention.output.bias), self.start)

    def added(self, block: Block, head_terms: HeadTerms, out: Parts | None = None) -> Parts:
        """What heads add, without the output bias; written into `out` if given."""
        weight, active = block.weights.attention.output.weight, list(self.active_heads(block))
        if len(active) < self.arch.heads:
            head_terms, weight = head_terms[:, :, active], weight[active]
        return torch.matmul(head_terms.transpose(2, 3).flatten(3), weight.flatten(0, 1), out=out)

    def mlp(self, block: Block, terms: Terms) -> Terms:
        """The MLP branch, with the gates as measured."""
        w, gate, start = block.mlp, self.layer(block).gate, terms.start
        assert gate is not None
        hidden = with_bias(terms.parts @ w.up.weight, start, w.up.bias).mul_(gate)
        return Terms(with_bias(hidden @ w.down.weight, start, w.down.bias), start)

    def add(self, block: Block, half: Half, terms: Terms, branches: dict[str, Terms]) -> Terms:
        """`skip Y` and the branches, attention last."""
        rest = [branches[part].parts for part in ("mlp", "attention") if part in branches]
        if not half.attends and rest:
            result = rest[0] if half.skip == 0.0 else rest[0].add_(terms.parts, alpha=half.skip)
            return terms._replace(parts=result)
        skip = torch.zeros_like(terms.parts) if half.skip == 0.0 else half.skip * terms.parts
        return terms._replace(parts=sum(rest, skip))

    def part(self, block: Block, part: Part, x: Any, inside: Any) -> Any:
        """Attention weights that a part of one's own has changed were kept as they came out."""
        return x if part.place == "pattern" else super().part(block, part, x, inside)

    def through(self, block: Block, terms: Terms) -> Terms:
        """Terms after a block; padding stays zero."""
        after: Terms = traverse(block, self, terms).state
        return after if self.whole else after._replace(parts=after.parts * self.frozen.valid[..., None])

    def end(self, terms: Terms) -> Parts:
        """Through the final norm, where there is one."""
        last = self.frozen.last
        if last is None:
            return terms.parts
        ended = last.apply(*terms)
        return ended if self.whole else ended * self.frozen.valid[..., None]


class WholeNetwork(FrozenRules):
    """Rules with one term, the whole network, with its biases or without."""

    def __init__(self, frozen: Frozen, heads: Sequence[Sequence[int]] | None = None, biases: bool = True) -> None:
        super().__init__(frozen, heads)
        self.start = 0 if biases else None

    def run(self) -> Tokens:
        """The output of the frozen network, of the heads named alone if any were."""
        terms = Terms(self.frozen.X[None], self.start)
        for layer in self.frozen.layers:
            terms = self.through(layer.block, terms)
        return self.end(terms)[0]


class OnePath(Arithmetic):
    """A mixin before an arithmetic's rules: follows one path, through one head per layer or past all."""

    head: int | None = None

    def active_heads(self, block: Block) -> tuple[int, ...]:
        """The head that the path takes in this layer, if any."""
        return () if self.head is None else (self.head,)

    def takes(self, block: Block, half: Half, branch: Branch) -> bool:
        """Through the head attention alone, past it everything else."""
        return not half.attends or (branch.part == "attention") == (self.head is not None)

    def add(self, block: Block, half: Half, state: Any, branches: dict[str, Any]) -> Any:
        """Through a head there is no skip."""
        if half.attends and self.head is not None:
            return branches["attention"]
        return super().add(block, half, state, branches)


class PathRules(OnePath, FrozenRules):
    """Rules along one path, with attention of the full network."""

    def step(self, index: int, Y: Tokens, head: int | None) -> Tokens:
        """Tokens `[batch, token, width]` after layer `index`, through that head or past all."""
        self.head = head
        return self.through(self.frozen.layers[index].block, Terms(Y[None])).parts[0]

    def term(self, path: Path, Y: Tokens) -> Tokens:
        """Tokens at the output, after all layers along the path and the final norm."""
        for index, head in enumerate(path):
            Y = self.step(index, Y, head)
        return self.end(Terms(Y[None]))[0]


class PathExtensions(FrozenRules):
    """Every way on from one path, side by side: past the heads first where that is a way, then each head."""

    def ways(self, index: int, Y: Tokens) -> list[tuple[int | None, Tokens]]:
        """Each way through layer `index`, and the tokens after it."""
        layer = self.frozen.layers[index]
        if not layer.ways:
            return []
        return list(zip(layer.ways, self.through(layer.block, Terms(Y[None])).parts, strict=True))

    def takes(self, block: Block, half: Half, branch: Branch) -> bool:
        """Attention is taken where a head is active, and the MLP beside it where there is a way past."""
        return not half.attends or branch.part == "mlp" or bool(block.active_heads)

    def output(self, block: Block, head_terms: HeadTerms) -> Terms:
        """What each head adds, as a part of its own."""
        active = list(block.active_heads)
        weight = block.weights.attention.output.weight[active]
        return Terms(torch.einsum("bhtc,hcd->hbtd", head_terms[0][:, active], weight))

    def add(self, block: Block, half: Half, terms: Terms, branches: dict[str, Terms]) -> Terms:
        """What goes past the heads beside what goes through each."""
        if not half.attends:
            return super().add(block, half, terms, branches)
        past, heads = ({name: branches[name] for name in branches if name != "attention"}, branches.get("attention"))
        ways = [super().add(block, half, terms, past).parts] if None in self.layer(block).ways else []
        return Terms(torch.cat([*ways, *([] if heads is None else [heads.parts])]))


PathStep = Callable[[int, Tensor, int | None], Tensor]  # (layer, tokens, head or None) -> tokens


class OwnAttention(OnePath, Plain):
    """The plain rules along one path, one layer at a time."""

    def __init__(self, frozen: Frozen) -> None:
        net = frozen.net
        super().__init__(net.arch, PassSettings.of(net.arch, net.weights, frozen.X, frozen.valid))
        self.frozen = frozen

    def step(self, index: int, X: Tokens, head: int | None) -> Tokens:
        """Tokens after layer `index`, through that head or past all."""
        self.head = head
        state: Tokens = traverse(self.frozen.layers[index].block, self, X).state
        return state * self.frozen.valid[..., None]

    def matrices(self, path: Path) -> dict[int, Tensor]:
        """By layer in which the path takes a head: that head's attention `[batch, token, token]`."""
        patterns, X = {}, self.frozen.X
        for index, self.head in enumerate(path):
            output = traverse(self.frozen.layers[index].block, self, X)
            if self.head is not None:
                patterns[index] = output.pattern[:, self.head]
            X = output.state * self.frozen.valid[..., None]
        return patterns


def path_terms(frozen: Frozen, paths: Iterable[Path], step: PathStep) -> Iterator[tuple[Path, Tensor]]:
    """Each path once, with its term `[batch, token, width]` before the final norm."""
    last = Path()
    walked = [frozen.X]  # where the last path stood before each layer, and at its end
    for path in sorted(set(paths), key=lambda path: [-1 if head is None else head for head in path]):
        common = next((at for at, (a, b) in enumerate(zip(last, path, strict=False)) if a != b), len(last))
        del walked[common + 1 :]
        for index in range(common, len(path)):
            walked.append(step(index, walked[-1], path[index]))
        last = path
        yield path, walked[-1]


@torch.no_grad()
def path_sum(frozen: Frozen, paths: Iterable[Path], step: PathStep) -> Tensor:
    """The sum of the path_terms of some paths, `[batch, token, width]`, before the final norm."""
    summed = torch.zeros_like(frozen.X)
    for _, term in path_terms(frozen, paths, step):
        summed = summed + term
    return summed
