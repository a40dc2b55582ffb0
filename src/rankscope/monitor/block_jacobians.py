"""Measures by how much blocks stretch what they are given, and how the directions of neighbouring blocks align.

Of one sample, `J_l = d vec(X_l) / d vec(X_{l-1})` is the Jacobian of block l, X_l the tokens that it returns, padding
left out. With its largest singular value s and the vectors of that, `J_l v_l = s u_l`,

    jacobian_norm      = s = ||J_l||_2          at layer l
    jacobian_alignment = |v_{l+1} . u_l|        at layer l, where the blocks l and l + 1 meet

(Ren et al. 2026, Definition 3.2). Two neighbouring blocks together stretch by at least the product of their norms and
their alignment, `||J_{l+1} J_l||_2 >= |u_{l+1}^T J_{l+1} J_l v_l|`: where alignments rise, gradients grow with depth.

After the probe was measured, the model is called with the probe once more, hooks keep what
each block takes and gives (`BlockCalls`), and then one block after the other runs again by itself. No Jacobian is
formed: with the graph of a block, `J^T u` is a backward pass, and since that is linear in u, `J v` is its derivative.
`leading_vectors` searches the largest singular value in a space that begins with the `KEPT` best vectors of the last
measurement and grows by `FIRST` vectors at the first measurement, by `LATER` at later ones (Lanczos' method). It takes
`KEPT + 2 steps + 1` products, each about as costly as a forward pass of the block.

The norm comes from below. The angle between the vectors and the true ones has a sine of at most `|J^T u - s v|` over
the distance from s to the next singular value (Wedin 1972), for which the next one of the space stands. The sum of this
error of both vectors is the floor of an alignment: where two directions are stretched nearly alike, it is not known.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rankscope.errors import MonitorError, require
from rankscope.live import (
    StackWatch,
    WatchPlan,
    candidates_in,
    exchanged,
    has_listed_parts,
    hidden_states_in,
    processes,
    same,
)
from rankscope.monitor.instrument import Instrument
from rankscope.monitor.measurement import MetricValues
from rankscope.monitor.probe import BlockFollower
from rankscope.monitor.training_state import preserved_training_state
from rankscope.shapes import Float
from rankscope.sources import first_line

NORM, ALIGNMENT = "jacobian_norm", "jacobian_alignment"
KEPT, FIRST, LATER = 2, 16, 6
TAKEN = object()  # stands for the hidden states among the arguments of a block
Product = Callable[[Float[Tensor, "sample entry"]], Float[Tensor, "sample entry"]]


@dataclass
class BlockCall:
    """One call of a block with the probe. Among its arguments `TAKEN` stands for the hidden states, and a cache of keys
    is left out: when the call is made again, it has the keys of this one."""

    layer: int  # that the block gives
    block: nn.Module
    args: list[Any]
    kwargs: dict[str, Any]
    taken: Tensor  # the hidden states that it took, as they were before the call
    given: Tensor  # the hidden states that it returned
    linked: bool = False  # True if these are what the next block took

    def again(self, x: Tensor, grid: bool) -> Tensor:
        """What the block returns for other hidden states."""
        args = [x if value is TAKEN else value for value in self.args]
        kwargs = {name: x if value is TAKEN else value for name, value in self.kwargs.items()}
        return returned_states(self.block(*args, **kwargs), x, grid)


class BlockCalls(BlockFollower):
    """Keeps the calls of blocks while the model runs."""

    def __init__(self, plan: WatchPlan) -> None:
        super().__init__(plan)
        self.calls: list[BlockCall] = []

    def _on_input(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = (kwargs["hidden_states"],) if "hidden_states" in kwargs else (*args, *kwargs.values())
        states = candidates_in(inputs, self.plan.grid)
        if not states:
            raise MonitorError(f"{type(block).__name__} must take hidden states; it took none", subject="jacobians")
        last = self.calls[-1] if self.calls else None
        linked = next((x for x in states if last is not None and same(x, last.given)), None)
        hidden = states[0] if linked is None else linked
        taken = hidden.detach().clone()
        if last is not None and linked is not None:
            last.given, last.linked = taken, True

        def kept(value: Any) -> Any:
            return TAKEN if value is hidden else None if type(value).__name__.endswith("Cache") else value

        layer = max(last.layer + 1 if last is not None else 1, self.first_layers[id(block)])
        named = {name: kept(value) for name, value in kwargs.items()}
        self.calls.append(BlockCall(layer, block, [*map(kept, args)], named, taken, taken))

    def _on_output(self, block: nn.Module, args: Any, output: Any) -> None:
        call = self.calls[-1]
        call.given = returned_states(output, call.taken, self.plan.grid).detach().clone()


def returned_states(output: Any, taken: Tensor, grid: bool) -> Tensor:
    """The hidden states in what a block returned: the one tensor of the shape that it took."""
    states = [x for x in candidates_in(output, grid) if x.shape == taken.shape]
    if len(states) != 1:
        several = f"a block returned {len(states)} of the shape {tuple(taken.shape)} that it took"
        raise MonitorError(f"the hidden states that a block returns must be one tensor; {several}", subject="jacobians")
    return states[0]


@contextmanager
def all_differentiable_twice(y: Tensor) -> Iterator[None]:
    """Inside, y is differentiated with `create_graph`. If the backward pass of an operation leaves autograd's graph, as
    those of kernels written for one derivative do, what comes after would silently be without it: that is an error."""
    nodes, ahead = dict[Any, None](), [y.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            ahead += [before for before, _ in node.next_functions]
    left: list[str] = []

    def check(node: Any, inputs: Any, outputs: Any) -> None:
        """`outputs` is what the node was given in the backward pass, `inputs` what it made of that."""
        if any(x is not None and x.requires_grad for x in outputs):
            made = [x for x in inputs if x is not None]
            refuses = [x for x in made if x.requires_grad and x.grad_fn is not None and "Error" in x.grad_fn.name()]
            if refuses or any(not x.requires_grad and bool(x.any()) for x in made):
                left.append(node.name())

    with ExitStack() as hooks:
        for node in nodes:
            hooks.callback(node.register_hook(partial(check, node)).remove)
        yield
    if left:
        sentence = f"blocks must be differentiable twice; {left[0]} is not, as most fused kernels"
        raise MonitorError(sentence, subject="jacobians")


class LeadingVectors(NamedTuple):
    """The largest singular value of a matrix for each sample, and its vectors, of length one: `J v = norm u`."""

    norm: Float[Tensor, " sample"]  # the singular value, from below; NaN if products were not finite
    left: Float[Tensor, "sample entry"]  # u
    right: Float[Tensor, "sample entry"]  # v
    error: Float[Tensor, " sample"]
    """The sine of the angle to the true vectors, at most, as far as the space shows; 1 if nothing is known."""
    space: Float[Tensor, "vector sample entry"]  # its best vectors, v first: where another search begins


def leading_vectors(
    product: Product, transposed: Product, start: Float[Tensor, "vector sample entry"], steps: int
) -> LeadingVectors:
    """Find the largest singular value of a square matrix J for each sample, given only its products with vectors.

    Args:
        product: Gives `J v`.
        transposed: Gives `J^T u`.
        start: Vectors that the search begins with.
        steps: How many vectors are added, each the residual `J^T u - s v` of the best ones so far.

    >>> J = torch.diag(torch.tensor([3.0, 1.0, 0.5]))
    >>> found = leading_vectors(lambda v: v @ J.T, lambda u: u @ J, torch.ones(1, 1, 3), 2)
    >>> round(float(found.norm), 5), found.right.abs().round(decimals=3).tolist()
    (3.0, [[1.0, 0.0, 0.0]])
    """
    V, W = start.new_empty(0, *start.shape[1:]), start.new_empty(0, *start.shape[1:])  # orthonormal vectors, and J V

    def widened(v: Tensor) -> tuple[Tensor, Tensor]:
        """V and W with one more vector: what v has beyond V, or zero if that is rounding alone."""
        length = torch.linalg.vector_norm(v, dim=-1)
        for _ in range(2):  # the second time removes what rounding left of the first
            v = v - torch.einsum("ksn,ks->sn", V, torch.einsum("ksn,sn->ks", V, v))
        rest = torch.linalg.vector_norm(v, dim=-1)
        known = rest > math.sqrt(torch.finfo(v.dtype).eps) * length
        v = torch.where(known[:, None], v / torch.where(known, rest, 1.0)[:, None], 0.0)
        return torch.cat([V, v[None]]), torch.cat([W, product(v)[None]])

    for v in start:
        V, W = widened(v)
    for step in range(steps + 1):
        gram = torch.einsum("ksn,lsn->skl", W, W).double()
        finite = gram.isfinite().all(-1).all(-1)
        squares, y = torch.linalg.eigh(torch.where(finite[:, None, None], gram, 0.0))
        s, y = squares.clamp(min=0.0).sqrt().flip(-1), y.flip(-1).to(V.dtype)  # the largest first
        norm, best = s[:, 0].to(V.dtype), torch.einsum("ksn,skj->jsn", V, y[..., :KEPT])
        right = best[0]
        left = torch.einsum("ksn,sk->sn", W, y[..., 0]) / torch.where(norm > 0, norm, 1.0)[:, None]
        residual = transposed(left) - norm[:, None] * right
        if step < steps:
            V, W = widened(residual)
    gap = s[:, 0] - (s[:, 1] if s.shape[1] > 1 else 0.0)
    error = torch.linalg.vector_norm(residual, dim=-1).double() / gap
    error = torch.where(error.isfinite(), error.clamp(max=1.0), 1.0)
    return LeadingVectors(torch.where(finite, s[:, 0], torch.nan), left, right, error, best)


class BlockJacobians(Instrument):
    """Measures norms and alignments of the Jacobians of a model's blocks on a probe, again and again: the vectors of
    one measurement are where the next begins. Models of which they cannot be had are refused, on every rank alike."""

    name, subject, metrics, must_work = "jacobians", "Jacobians of blocks are", (NORM, ALIGNMENT), True

    def attach(self) -> None:
        """Refuse a training without a probe, or blocks that cannot be called again."""
        model, plans = self.monitor.wrapped, self.monitor.plans.values()
        received = f"those of {type(model).__name__} are sharded (FSDP, ZeRO-3): leave jacobians out"
        listed = any(has_listed_parts(plan.blocks) for plan in plans)
        lists = "its layers are lists of parts, and are not called themselves: leave jacobians out"
        for refused, sentence in (
            (self.monitor.probe is None, "Jacobians are those of a probe; there is none: give probe="),
            (processes.is_sharded(model), f"Jacobians need blocks that hold their weights; {received}"),
            (listed, f"Jacobians need blocks that can be called again; {lists}"),
        ):
            require(not refused, sentence, MonitorError, "jacobians")
        self._measured, self._failed = set[str](), set[str]()  # stacks
        self._spaces: dict[tuple[str, int], Tensor] = {}  # by layer, where the next search begins; bfloat16, on the CPU

    def read_stack(self, plan: WatchPlan) -> MetricValues:
        """The numbers of every sample of the probe; none any more after a measurement that failed on some rank.

        Raises:
            MonitorError: The first measurement failed.
        """
        if plan.name in self._failed:
            return MetricValues()
        values, failure = MetricValues(), None
        try:
            with preserved_training_state(self.monitor.model), sdpa_kernel(SDPBackend.MATH):  # fused: one derivative
                values = self._measure(plan)
        except Exception as error:  # blocks that keep something, kernels without derivatives, too little memory
            failure = first_line(error)
        why = next((reason for reason in processes.gathered(failure) if reason is not None), None)
        if why is None:
            self._measured.add(plan.name)
            return values
        sentence = f"Jacobians of blocks are not measured: {why}"
        require(plan.name in self._measured, f"{sentence}: leave jacobians out", MonitorError, "jacobians")
        self._failed.add(plan.name)
        self._spaces = {key: space for key, space in self._spaces.items() if key[0] != plan.name}
        self.remarks.append(sentence)
        return MetricValues()

    def _measure(self, plan: WatchPlan) -> MetricValues:
        model, plan = self.monitor.model, replace(plan, metrics=())
        recorded = BlockCalls(plan)
        with StackWatch(model, plan, of_this_thread=True) as watch, recorded.attached():
            self.monitor.probe.call(model)
        values, before = MetricValues(), None
        for call in recorded.calls:
            layer, after = call.layer, None
            if plan.measures(layer) or plan.measures(layer - 1):
                after = self._leading(plan, call, watch.totals.valid)
                if plan.measures(layer):
                    values.add(layer, NORM, after.norm)
                if before is not None and plan.measures(layer - 1):
                    cosine = (before.left.to(after.right) * after.right).sum(-1).abs().double()
                    known = (before.norm.to(cosine) > 0) & (after.norm > 0)  # a Jacobian of zeros has no direction
                    floor = (before.error.to(cosine) + after.error).clamp(max=1.0)
                    values.add(layer - 1, ALIGNMENT, torch.where(known, cosine, torch.nan), floor)
            before = after if call.linked else None
        gaps = ", ".join(str(call.layer) for call in recorded.calls[:-1] if not call.linked)
        sentence = f"{ALIGNMENT} is not measured where a block takes other than the last one gave: {gaps}"
        self.remarks += [sentence] if gaps and sentence not in self.remarks else []
        return values

    @torch.enable_grad()
    def _leading(self, plan: WatchPlan, call: BlockCall, valid: Tensor) -> LeadingVectors:
        """The leading vectors of one block; its graph is freed with what is returned."""
        name = type(call.block).__name__
        x = call.taken.detach().requires_grad_()
        try:
            y = call.again(x.clone(), plan.grid)  # a block may write into what it takes
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raised = f"that of layer {call.layer} raised {type(error).__name__}: {first_line(error)}"
            raise MonitorError(f"{name} must run again by itself; {raised}", subject="jacobians") from error
        _check_same(call, y.detach())
        shape = exchanged(x, plan.layout).shape if x.ndim == 3 else x.shape
        dtype = torch.promote_types(x.dtype, torch.float32)

        def flat(states: Tensor) -> Tensor:
            """Hidden states as a row for each sample, zero at padding."""
            tokens = hidden_states_in(states, plan.layout, "a Jacobian", plan.grid)[0].to(dtype)
            return (tokens * valid.to(tokens.device)[..., None]).flatten(1)

        def shaped(rows: Tensor) -> Tensor:
            """Return rows, one for each sample, as hidden states in the layout and dtype of the block's input."""
            states = rows.view(shape)
            return (exchanged(states, plan.layout) if x.ndim == 3 else states).to(x.dtype)

        cotangent = _drawn(*y.shape).to(y).requires_grad_()
        with all_differentiable_twice(y):
            (backward,) = torch.autograd.grad(y, x, cotangent, create_graph=True)  # J^T u; its derivative is J v

        def product(v: Tensor) -> Tensor:
            return flat(torch.autograd.grad(backward, cotangent, shaped(v), retain_graph=True)[0])

        def transposed(u: Tensor) -> Tensor:
            return flat(torch.autograd.grad(y, x, shaped(u).to(y.dtype), retain_graph=True)[0])

        space = self._spaces.get((plan.name, call.layer))
        if space is None:
            counted = flat(torch.ones_like(x))
            start = _drawn(KEPT, 1, counted.shape[1]).to(counted) * counted  # samples begin alike on whichever rank
        else:
            start = space.to(x.device, dtype)
        with torch.no_grad():
            leading = leading_vectors(product, transposed, start, FIRST if space is None else LATER)
        if bool(leading.space.isfinite().all()):
            self._spaces[plan.name, call.layer] = leading.space.to("cpu", torch.bfloat16)
        return leading


def _check_same(call: BlockCall, y: Tensor) -> None:
    """Raise unless the block gave what it gave within the model, to half of the digits that it computes with."""
    device = y.device.type
    narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else y.dtype
    size = torch.linalg.vector_norm(call.given.double())
    apart = float(torch.linalg.vector_norm((y - call.given).double()) / size)
    if apart > math.sqrt(torch.finfo(narrow).eps):  # not where either is NaN: then so is what is measured
        name = type(call.block).__name__
        received = f"at layer {call.layer} it gave tokens that differ by {apart:.2g} of their size"
        raise MonitorError(f"{name} must give the same when it runs again by itself; {received}", subject="jacobians")


def _drawn(*shape: int) -> Tensor:
    """Random numbers that are the same each time, and leave the training's generators alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
