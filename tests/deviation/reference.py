"""An independent transformer in hundreds of digits: plain loops over mpmath numbers, from the definitions.

It knows nothing of deviations: it computes every token to full precision and subtracts at the end.
"""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import mpmath as mp
from torch import Tensor

from rankscope.nets import Architecture, Transformer, mask_matrix
from rankscope.profiles import measure
from tests.builders import awake, normal

Rows = list[list[Any]]


def exact(tensor: Tensor) -> Any:
    """Nested lists of mpmath numbers, each float64 taken as it is."""
    if tensor.ndim == 0:
        return mp.mpf(float(tensor))
    return [exact(part) for part in tensor]


def dot(a: list[Any], b: list[Any]) -> Any:
    return mp.fsum(u * v for u, v in zip(a, b, strict=True))


def times(X: Rows, W: Rows, b: list[Any] | None = None) -> Rows:
    columns = list(zip(*W, strict=True))
    return [[dot(row, list(column)) + (b[j] if b else 0) for j, column in enumerate(columns)] for row in X]


def mixed(P: Rows, V: Rows) -> Rows:
    """P V; a weight of zero counts for nothing, whatever its value is. Rows that sum to one, to the last digits, do
    so truly: values are averaged about that of the largest weight, and equal ones give themselves, not rounded."""
    return [_average(row, V) for row in P]


def _average(row: list[Any], V: Rows) -> list[Any]:
    seen = [j for j, p in enumerate(row) if p]
    if abs(mp.fsum(row) - 1) > mp.mpf(10) ** (3 - mp.mp.dps) or not seen:
        return [mp.fsum(row[j] * V[j][k] for j in seen) for k in range(len(V[0]))]
    top = V[max(seen, key=lambda j: row[j])]
    return [top[k] + mp.fsum(row[j] * (V[j][k] - top[k]) for j in seen) for k in range(len(top))]


def phi(z: Any) -> Any:
    return mp.erfc(-z / mp.sqrt(2)) / 2


def sigmoid(z: Any) -> Any:
    return 1 / (1 + mp.exp(-z))


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu": lambda z: z * phi(z),
    "gelu_tanh": lambda z: z * sigmoid(2 * mp.sqrt(2 / mp.pi) * (z + mp.mpf("0.044715") * z**3)),
    "quick_gelu": lambda z: z * sigmoid(mp.mpf("1.702") * z),
    "relu": lambda z: max(z, mp.mpf(0)),
    "silu": lambda z: z * sigmoid(z),
    "tanh": mp.tanh,
    "identity": lambda z: z,
}


class Network:
    """The network of an `Architecture` and its tensors, one sample at a time.

    Where remedies act (`before`, `read`, `adds`, `sums`, `outputs`) nothing happens until a subclass says so."""

    padded = 0
    """Padded positions beside the tokens: a mask is one of all positions (bigbird's depends on their number)."""

    def __init__(self, net: Transformer) -> None:
        self.arch: Architecture = net.arch
        self.tensors = {name: exact(tensor) for name, tensor in net.state_dict().items()}
        self.memory: Any = None if net.memory is None else exact(net.memory.tokens[0][net.memory.valid[0]])
        self._tables: dict[tuple[int, int], Any] = {}

    def before(self, index: int, X: Rows) -> Rows:
        """What a branch's norm gets."""
        return X

    def read(self, index: int, X: Rows) -> Rows:
        """What a branch reads, after its norm."""
        return X

    def adds(self, index: int, kind: str, Y: Rows) -> Rows:
        """What a branch adds, before the second norm of a sandwich."""
        return Y

    def sums(self, index: int, X: Rows) -> Rows:
        """The sum of attention and its skip, before the norm of a post-norm network."""
        return X

    def outputs(self, here: int, X: Rows, said: list[Rows]) -> list[Rows]:
        """[head][token][value_width]: the outputs of heads of attention, before the output projection."""
        return said

    def states(self, X: Tensor) -> list[Rows]:
        """Every state of one sample [token, width]."""
        rows: Rows = exact(X)
        if self.arch.positions == "absolute":
            table = self.tensors["positions"]
            rows = [[u + v for u, v in zip(row, table[i], strict=True)] for i, row in enumerate(rows)]
        states = [rows]
        for layer in range(self.arch.layers):
            states.append(self.layer(layer, states[-1]))
        return states

    def layer(self, index: int, X: Rows) -> Rows:
        arch = self.arch
        post, sandwich = arch.norm_place == "post", arch.norm_place in ("sandwich", "output")
        pre = arch.norm_place in ("pre", "sandwich")
        here = 0 if arch.shared else index

        def norm(name: str, Y: Rows) -> Rows:
            return self.norm(f"layers.{here}.{name}", Y)

        def branch(kind: str, Y: Rows) -> Rows:
            bare = kind == "attention" and index in arch.bare_layers
            inside = self.before(index, Y)
            inside = self.read(index, norm(f"{kind}_norm", inside) if pre and not bare else inside)
            if kind == "cross":
                out = self.spoken(here, inside, self.memory, self.crossing(here, inside), kind)
            else:
                out = self.attention(index, here, inside) if kind == "attention" else self.mlp(here, inside)
            out = self.adds(index, kind, out)
            return norm(f"{kind}_after", out) if sandwich else out

        def joined(weight: float, Y: Rows, *parts: Rows) -> Rows:
            total = [[mp.fsum(entries) for entries in zip(*rows, strict=True)] for rows in zip(*parts, strict=True)]
            if not weight:  # X is not there: no NaN of it comes in
                return total
            return [[mp.mpf(weight) * y + t for y, t in zip(*rows, strict=True)] for rows in zip(Y, total, strict=True)]

        first = branch("attention", X)
        if arch.parallel:
            parts = [first] if arch.mlp == "none" else [first, branch("mlp", X)]
            X = self.sums(index, joined(arch.attention_skip, X, *parts))
            return norm("attention_norm", X) if post else X
        X = self.sums(index, joined(arch.attention_skip, X, first))
        X = norm("attention_norm", X) if post else X
        if arch.cross_attention:
            X = joined(arch.attention_skip, X, branch("cross", X))
            X = norm("cross_norm", X) if post else X
        if arch.mlp == "none":
            return X
        X = joined(arch.mlp_skip, X, branch("mlp", X))
        return norm("mlp_norm", X) if post else X

    def norm(self, name: str, X: Rows) -> Rows:
        arch = self.arch
        if arch.norm == "none":
            return X
        gain, bias = self.tensors.get(f"{name}.gain"), self.tensors.get(f"{name}.bias")
        out = []
        for row in X:
            mean = mp.fsum(row) / len(row) if arch.norm == "layer" else 0
            alike = arch.norm == "layer" and all(u == row[0] for u in row)  # the mean may be rounded
            centred = [mp.mpf(0) if alike else u - mean for u in row]
            square = dot(centred, centred) / (1 if arch.norm == "scale" else len(row))
            scale = 1 / mp.sqrt(square + mp.mpf(arch.norm_eps) or 1)  # a token of length zero stays zero
            out.append([u * scale * (gain[j] if gain else 1) + (bias[j] if bias else 0) for j, u in enumerate(centred)])
        return out

    def mlp(self, here: int, X: Rows) -> Rows:
        act = ACTIVATIONS[self.arch.activation]
        if self.arch.mixes(here):
            return [self.mixture(f"layers.{here}.experts", x) for x in X]

        def linear(name: str, Y: Rows) -> Rows:
            prefix = f"layers.{here}.mlp.{name}"
            return times(Y, self.tensors[f"{prefix}.weight"], self.tensors.get(f"{prefix}.bias"))

        hidden = linear("up", X)
        if self.arch.mlp != "plain":
            gate = linear("gate", X)
            hidden = [[act(g) * u for g, u in zip(a, b, strict=True)] for a, b in zip(gate, hidden, strict=True)]
        else:
            hidden = [[act(u) for u in row] for row in hidden]
        return linear("down", hidden)

    def mixture(self, name: str, x: list[Any]) -> list[Any]:
        """One token through the experts of its largest scores: a softmax (Mixtral), or sigmoids, corrected and in
        groups (DeepSeek-V3)."""
        experts = self.arch.experts
        assert experts is not None
        (logits,) = times([x], self.tensors[f"{name}.router.weight"], self.tensors.get(f"{name}.router.bias"))
        if any(mp.isnan(each) for each in logits):  # nobody knows which are the largest
            return [mp.nan] * len(x)
        top = max(logits)
        weights = [mp.exp(each - top) for each in logits]
        scores = [
            sigmoid(each) if experts.sigmoid else w / mp.fsum(weights) for each, w in zip(logits, weights, strict=True)
        ]
        correction = self.tensors.get(f"{name}.correction") or [0] * len(scores)
        # A sigmoid of 1e16 is one to any number of digits: what it lacks, -s(-z), comes second.
        lacks = [-sigmoid(-z) if experts.sigmoid and z > 0 else s for z, s in zip(logits, scores, strict=True)]
        by = [(a + b, part) for a, b, part in zip(scores, correction, lacks, strict=True)]
        size = len(by) // experts.groups
        groups = [range(g * size, (g + 1) * size) for g in range(experts.groups)]

        def sums(group: range) -> tuple[Any, ...]:
            top = sorted((by[e] for e in group), reverse=True)[: experts.group_best]
            return tuple(-mp.fsum(numbers) for numbers in zip(*top, strict=True))

        open_ = [e for group in sorted(groups, key=sums)[: experts.groups_chosen] for e in group]
        best = sorted(sorted(open_), key=lambda e: by[e], reverse=True)[: experts.chosen]
        total = mp.fsum(scores[e] for e in best) if experts.renormalised else 1
        parts = [[scores[e] / total * u for u in self.expert(name, x, e)] for e in best]
        if experts.shared_width:
            gate = times([x], self.tensors[f"{name}.shared_gate.weight"])[0] if experts.shared_gate else None
            share = 1 if gate is None else sigmoid(gate[0])
            parts.append([share * u for u in self.expert(f"{name}.shared", x)])
        return [mp.fsum(column) for column in zip(*parts, strict=True)]

    def expert(self, name: str, x: list[Any], e: int | None = None) -> list[Any]:
        """One expert, or the shared one, on one token: (act(x W_g) * (x W_u)) W_d; under a limit L (gpt-oss) the
        gate is at most L, and in the place of u stands 1 + u, u within L."""
        experts, act = self.arch.experts, ACTIVATIONS[self.arch.activation]
        assert experts is not None

        def through(part: str, y: list[Any]) -> list[Any]:
            W, b = self.tensors[f"{name}.{part}.weight"], self.tensors.get(f"{name}.{part}.bias")
            if e is not None:
                W = W[e] if part == "down" else [row[e] for row in W]
                b = b and b[e]
            return times([y], W, b)[0]

        gate, up, limit = through("gate", x), through("up", x), mp.mpf(experts.limit)
        if limit:
            gate, up = [min(g, limit) for g in gate], [1 + min(max(u, -limit), limit) for u in up]
        return through("down", [act(g) * u for g, u in zip(gate, up, strict=True)])

    def heads(self, here: int, name: str, X: Rows, kind: str = "attention") -> list[Rows]:
        """[head][token][head_width] of queries, keys or values."""
        X = self.latent(f"layers.{here}.{kind}", name, X)
        weight = self.tensors[f"layers.{here}.{kind}.{name}.weight"]  # [width][head][head_width]
        bias = self.tensors.get(f"layers.{here}.{kind}.{name}.bias")
        count = len(weight[0])
        return [times(X, [row[h] for row in weight], bias[h] if bias else None) for h in range(count)]

    def latent(self, prefix: str, name: str, X: Rows) -> Rows:
        """What queries, keys or values are linear in: tokens, or their latent, its norm's eps 1e-6."""
        which = f"{prefix}.{'query' if name == 'query' else 'key'}_latent"
        if name == "gate" or f"{which}.weight" not in self.tensors:
            return X
        gain, out = self.tensors[f"{which}.norm.gain"], []
        for row in times(X, self.tensors[f"{which}.weight"], self.tensors.get(f"{which}.bias")):
            first, beside = row[: len(gain)], row[len(gain) :]
            scale = 1 / mp.sqrt(dot(first, first) / len(first) + mp.mpf(1e-6))
            normed = [u * scale * g for u, g in zip(first, gain, strict=True)]
            out.append(normed if name == "value" else normed + beside)
        return out

    def attention(self, index: int, here: int, X: Rows) -> Rows:
        return self.spoken(here, X, X, self.matrices(index, here, X))

    def spoken(self, here: int, X: Rows, source: Rows, found: list[Rows], kind: str = "attention") -> Rows:
        """What heads add that mix values of a source by the matrices found."""
        name, group = f"layers.{here}.{kind}.output", self.arch.heads // self.arch.key_heads
        v, output, bias = (
            self.heads(here, "value", source, kind),
            self.tensors[f"{name}.weight"],
            self.tensors.get(f"{name}.bias"),
        )
        said = [mixed(P, v[h // group]) for h, P in enumerate(found)]
        if self.arch.head_gate and kind == "attention":
            gates = self.heads(here, "gate", X)
            said = [
                [[u * sigmoid(g) for u, g in zip(*rows, strict=True)] for rows in zip(*pair, strict=True)]
                for pair in zip(said, gates, strict=True)
            ]
        parts = self.contributions(said if kind == "cross" else self.outputs(here, X, said), output, kind)
        return [
            [mp.fsum(part[i][j] for part in parts) + (bias[j] if bias else 0) for j in range(self.arch.width)]
            for i in range(len(X))
        ]

    def contributions(self, said: list[Rows], output: Any, kind: str) -> list[Rows]:
        """[head][token][width]: what each head adds."""
        return [times(each, output[h]) for h, each in enumerate(said)]

    def sees(self, index: int, n: int) -> list[list[bool]]:
        """Whether token i sees token j, among n tokens and the padding behind them."""
        seen = mask_matrix(self.arch.mask_of(index), n + self.padded)[:n, :n]
        return [[bool(entry) for entry in row] for row in seen]

    def matrices(self, index: int, here: int, X: Rows) -> list[Rows]:
        """[head][token][token]: attention."""
        arch, n, name = self.arch, len(X), f"layers.{here}.attention"
        q, k = (self.heads(here, part, X) for part in ("query", "key"))
        if arch.query_norm:
            q, k = self.scaled(f"{name}.query_norm", q), self.scaled(f"{name}.key_norm", k)
        mask = self.sees(index, n)

        def row(h: int, i: int) -> list[Any]:
            g = h // (arch.heads // arch.key_heads)
            seen = [j for j in range(n) if mask[i][j]]
            scores = [self.score(index, here, h, i, j, q[h][i], k[g][j]) for j in seen]
            weights = dict(zip(seen, self.softmax(scores, n), strict=True))
            return [weights.get(j, mp.mpf(0)) for j in range(n)]

        return [[row(h, i) for i in range(n)] for h in range(arch.heads)]

    def crossing(self, here: int, X: Rows) -> list[Rows]:
        """[head][token][source]: attention to the memory."""
        group = self.arch.heads // self.arch.key_heads
        q, k = self.heads(here, "query", X, "cross"), self.heads(here, "key", self.memory, "cross")

        def row(h: int, asked: list[Any]) -> list[Any]:
            return self.softmax([self.content(asked, key) for key in k[h // group]], len(self.memory))

        return [[row(h, asked) for asked in q[h]] for h in range(self.arch.heads)]

    def content(self, q: list[Any], k: list[Any]) -> Any:
        """A score without positions."""
        divisor = mp.mpf(self.arch.divisor)
        if self.arch.kernel == "uniform":
            return mp.mpf(0)
        if self.arch.kernel == "gaussian":
            gap = [a - b for a, b in zip(q, k, strict=True)]
            return -dot(gap, gap) / (2 * divisor)
        return dot(q, k) / divisor

    def softmax(self, scores: list[Any], n: int) -> list[Any]:
        """Weights of scores, capped first, then times `log_gain ln n` where there is such a gain."""
        scores = [self.capped(score) for score in scores]
        if self.arch.log_gain:
            gain = mp.mpf(self.arch.log_gain * math.log(n))
            scores = [score * gain for score in scores]
        top = max(scores)
        weights = [mp.exp(score - top) for score in scores]
        total = mp.fsum(weights)
        return [weight / total for weight in weights]

    def capped(self, score: Any) -> Any:
        cap = mp.mpf(self.arch.score_cap)
        return cap * mp.tanh(score / cap) if cap else score

    def scaled(self, name: str, parts: list[Rows]) -> list[Rows]:
        """Every query or key divided by its root mean square, times a gain."""
        gain, eps = self.tensors[f"{name}.gain"], mp.mpf(self.arch.norm_eps)
        if self.arch.query_norm_across:  # of all heads of a token, side by side
            width, whole = len(parts[0][0]), [[u for part in parts for u in part[i]] for i in range(len(parts[0]))]
            roots = [mp.sqrt(dot(row, row) / len(row) + eps or 1) for row in whole]
            return [
                [[u * gain[h * width + j] / roots[i] for j, u in enumerate(row)] for i, row in enumerate(part)]
                for h, part in enumerate(parts)
            ]
        return [
            [
                [u * g / mp.sqrt(dot(row, row) / len(row) + eps or 1) for u, g in zip(row, gain, strict=True)]
                for row in part
            ]
            for part in parts
        ]

    def score(self, index: int, here: int, h: int, i: int, j: int, q: list[Any], k: list[Any]) -> Any:
        arch, name = self.arch, f"layers.{here}.attention"
        divisor = mp.mpf(arch.divisor)
        if arch.kernel == "uniform":
            return mp.mpf(0)
        added = mp.mpf(0)
        if arch.positions == "relative":
            position = self.sinusoid(i - j)
            weight = self.tensors[f"{name}.position"]
            r = [mp.fsum(position[d] * weight[d][h][c] for d in range(arch.width)) for c in range(len(q))]
            v = self.tensors[f"{name}.position_bias"][h]
            added = dot([a + b for a, b in zip(q, v, strict=True)], r) / divisor
            q = [a + b for a, b in zip(q, self.tensors[f"{name}.content_bias"][h], strict=True)]
        elif arch.positions == "rotary":
            q, k = self.turned(index, q, i), self.turned(index, k, j)
        elif arch.positions == "bias":
            added = self.tensors["bias_table"][bucket(j - i, arch.bias_buckets, arch.bias_reach)][h]
        elif arch.positions == "alibi":
            assert arch.heads in (1, 2, 4)
            added = -(mp.mpf(2) ** (mp.mpf(-8) * (h + 1) / arch.heads)) * abs(i - j)
        return self.content(q, k) + added

    def sinusoid(self, offset: int) -> list[Any]:
        """As the float64 network has it: the table is part of its weights, not of its arithmetic."""
        import torch

        from rankscope.nets.positions import sinusoids

        n = abs(offset) + 1
        table = sinusoids(self.arch, n, torch.zeros((), dtype=torch.float64))
        return list(exact(table[n - 1 - offset]))

    def turned(self, index: int, u: list[Any], position: int) -> list[Any]:
        import torch

        from rankscope.nets import rotary_tables

        if (index, position) not in self._tables:
            tables = rotary_tables(self.arch, position + 1, torch.zeros((), dtype=torch.float64))
            self._tables[index, position] = [exact(table[position]) for table in tables[index % len(tables)]]
        cos, sin = self._tables[index, position]
        half = self.arch.rotary_width // 2
        out = list(u)
        for f in range(half):
            a, b = (f, f + half) if self.arch.rotary_pairs == "half" else (2 * f, 2 * f + 1)
            c, s = cos[f], sin[f]
            if self.arch.kernel == "gaussian":  # a rotation keeps lengths; of a rounded one 1e-16 of |k|^2 would show
                length = mp.sqrt(c * c + s * s) / mp.mpf(self.arch.rotary_scale_of(index))
                c, s = c / length, s / length
            out[a], out[b] = u[a] * c - u[b] * s, u[b] * c + u[a] * s
        return out


def bucket(ahead: int, number: int, reach: int) -> int:
    """T5's bucket of j - i, one at a time."""
    side = number // 2
    exact_ones = side // 2
    distance = abs(ahead)
    base = side if ahead > 0 else 0
    if distance < exact_ones:
        return base + distance
    grown = mp.log(mp.mpf(distance) / exact_ones) / mp.log(mp.mpf(reach) / exact_ones) * (side - exact_ones)
    return base + min(side - 1, exact_ones + int(grown))


def composite(A: Rows) -> Any:
    """||A||_{1,inf}."""
    rows, columns = (max(mp.fsum(map(abs, line)) for line in lines) for lines in (A, zip(*A, strict=True)))
    return mp.sqrt(rows * columns)


def log10_residual(X: Rows) -> Any:
    """log10 of ||X - 1 mean^T||_{1,inf}; None when the tokens are exactly equal."""
    mean = [mp.fsum(column) / len(X) for column in zip(*X, strict=True)]
    size = composite([[u - m for u, m in zip(row, mean, strict=True)] for row in X])
    return mp.log10(size) if size else None


def log10_size(X: Rows) -> Any:
    """log10 of the largest entry of X."""
    return mp.log10(max(abs(u) for u in itertools.chain(*X)))


DIGITS = 400
WITHIN = 1e-10


class Rounded(Network):
    """The same network, every entry of each state moved by up to 1e-16 of the most that its tokens differ by.

    R loses as much when it is rounded: of clusters of tokens far apart, what differs within them."""

    def layer(self, index: int, X: Rows) -> Rows:
        draw = random.Random(index)
        spread = max(max(column) - min(column) for column in zip(*X, strict=True))
        moved = [[u + spread * mp.mpf(draw.uniform(-1e-16, 1e-16)) for u in row] for row in X]
        return super().layer(index, moved)


def compare(arch: Architecture, seed: int, scale: float = 1.0, sure: bool = True) -> float:
    """log10 of the residual at every layer, within 1e-10; answers with the smallest log10 met.

    What misses that may be off by a thousand times as much as the exact answer moves when states are rounded,
    by 1e-6 at most, or it is marked; where the comparison is `sure`, nothing is."""
    net = awake(arch, seed)
    X = scale * normal(1, 4, arch.width, seed=seed + 1)
    lowest = 0.0
    with mp.workdps(DIGITS):
        exact = [log10_residual(state) for state in Network(net).states(X[0])]
    profile = measure(net, X, metrics="residual")
    logs, marks = (profile.curve("residual", each)[0].tolist() for each in ("log10", "below_floor"))
    for layer, (mine, marked, true) in enumerate(zip(logs, marks, exact, strict=True)):
        assert not (sure and marked), (layer, arch)
        if true is None or true < -0.8 * DIGITS:
            # Exactly equal, or beyond the digits of the reference.
            assert mine < -0.8 * DIGITS or marked
            continue
        error, allowed = abs(mine - float(true)), WITHIN * max(1.0, abs(float(true)) / 100)
        if error >= allowed and not marked:
            with mp.workdps(DIGITS):
                allowed += 1000 * abs(log10_residual(Rounded(net).states(X[0])[layer]) - true)
            assert error < min(allowed, 1e-6), (layer, arch)
        lowest = min(lowest, float(true))
    return lowest


SMALL: dict[str, Any] = {"layers": 3, "width": 4, "heads": 2, "head_width": 2, "mlp_width": 8, "length": 8,
                         "bias_buckets": 8, "bias_reach": 6}  # fmt: skip
