"""Is the uniform state attracting? What becomes of a small difference between tokens that all but agree.

Where all tokens equal x, scores are equal within what a token sees, so every head attends by the
row-normalised mask P0. To first order in a deviation R,

    attention:   P0 R W,    W = sum of W_h over the heads that speak,

because the change of P multiplies equal values and rows of P sum to one. Norms, MLPs and skips act on
each token alone. So the derivative of a layer is `R' = R A + P0 R B`, A and B depending on x only. With
`P0 v = nu v` and `R = v r^T` the modes part, as in the master stability function of synchronised
oscillators (Pecora & Carroll 1998):

    r' = r G_nu,    G_nu = A + nu B = G_0 + nu (G_1 - G_0).

v = 1 (nu = 1) moves the common token; every other eigenvalue of P0 is transverse. A complete mask has
nu = 0 alone, a causal one 1/2, 1/3, ..., 1/n. G_1 is the derivative of the network on one token, G_0
that of two tokens which move apart by r and -r: attention averages them away.

What the number leaves out:
- It is asymptotic. Eigenvectors of a mask that is not symmetric are far from orthogonal (causal), or too
  few (`unidirectional` has one for nu = 1/2): differences then grow for many layers, or carry a power of
  the depth, before they follow their exponent.
- It is local. Where rows of the mask differ, P is P0 only while differences of score, of the size of
  x W_QK R^T, are small. Without norms tokens may grow faster than their differences shrink: then no
  start is near enough to stay near. Attention comes to pick one token: where all pick the same,
  differences shrink by the skip alone, where each picks itself they grow as the tokens do.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.deviation import LOWEST, Deviation, Scaled, State, ValidTokens
from rankscope.errors import ArchitectureError, TokensError, require
from rankscope.nets import Architecture, Block, HeldLayers, Layer, Mask, PassSettings, Transformer, traverse
from rankscope.nets import mask_matrix as matrix
from rankscope.shapes import Bool, Complex, Float
from rankscope.theory.theorem import outside

Modes = Complex[Tensor, " mode"]

PROBES = 8  # Directions r followed in each mode, or all of a smaller width: almost any finds the largest growth
BELOW = -2000.0  # The log-scale of what is infinitesimal: its square and its share of a token are zero in float64
SAME = 1e-12  # Eigenvalues of P0 nearer than this are one mode
KERNELS = {
    **dict.fromkeys(("sigmoid", "sink"), "its rows do not sum to one, so that equal tokens need not stay equal"),
    "linear": "its weights are not a softmax of scores, which the exponent is derived for",
    "sinkhorn": "its columns are divided by sums over tokens as well, which the exponent does not know",
    "linformer": "it mixes tokens by weights of their own, so that no mask describes it",
}
"""Why a kernel has no exponent here."""


@dataclass(frozen=True)
class Exponent:
    """How fast a small difference between tokens grows, natural log per layer; below zero it shrinks."""

    rate: float  # Of the largest transverse mode; -inf where a layer leaves nothing of the first order
    mode: float | complex  # nu, the eigenvalue of P0 that attains it
    common: float  # Growth of the common token's length, natural log per layer


def transverse_exponent(net: Transformer, x: Tensor, tokens: int, *, relative: bool = False) -> Exponent:
    """The growth rate of small differences between `tokens` tokens that all but equal x at layer 0.

    x is `[width]`, absolute positions included: the mean of the tokens, say. `relative=True` subtracts
    the growth of the tokens' own length. The rate is the least-squares slope of the log over the second
    half of the layers (`slope`), so that transients do not count; repeat layers with
    `net.variant(layers=...)` for a longer average.

    >>> arch = Architecture(layers=40, width=8, heads=2, mlp="none", norm="none", attention_skip=0.9)
    >>> found = transverse_exponent(Transformer.random(arch), torch.randn(8), tokens=5)
    >>> abs(found.rate - math.log(0.9)) < 1e-12, found.mode
    (True, 0.0)
    """
    return exponent(net, x, transverse_modes(net.arch, tokens), relative=relative)


def transverse_modes(arch: Architecture, tokens: int, valid: int | None = None) -> Modes:
    """The eigenvalues nu of P0 but for one 1, each once and of conjugates one, largest first. `valid` of the tokens,
    the first ones, are not padding; all, if left out.

    >>> transverse_modes(Architecture(layers=1, width=8, heads=2, mask="causal"), 4).real
    tensor([0.5000, 0.3333, 0.2500], dtype=torch.float64)
    """
    _refuse(arch)
    count = tokens if valid is None else valid
    require(count >= 2, f"tokens that may differ must be at least 2; got {count}", TokensError, "tokens")
    specs = {arch.mask_of(layer) for layer in range(arch.layers)}
    seen = [matrix(spec, tokens)[:count, :count] for spec in specs]
    message = f"layers must share one mask; got {arch.mask!r:.40}: use net.variant(mask=...)"
    require(all(torch.equal(mask, seen[0]) for mask in seen), message, ArchitectureError, "mask")
    return _spectrum(seen[0])


def exponent(net: Transformer, x: Tensor, modes: Modes, *, relative: bool = False) -> Exponent:
    """The transverse exponent about token x for given modes: of a mask, or any numbers in the unit disc."""
    _refuse(net.arch)
    if not isinstance(x, Tensor) or x.shape != (net.arch.width,):
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise TokensError(f"x must be one token [{net.arch.width}]; received {got}", subject="x")
    require(x.isfinite().all(), "x must be finite; received a token with NaN or infinite entries", TokensError, "x")
    with torch.no_grad():
        logs, length = _growth(net.to(torch.float64), x, modes)
    rates, common = slope(logs), float(slope(length))
    best = int(rates.argmax())
    rate, nu = float(rates[best]), complex(modes[best])
    if relative and rate > -math.inf:
        rate = rate - common if common > -math.inf else 0.0  # x = 0: differences are all there is
    return Exponent(rate, nu if nu.imag else nu.real, common)


def slope(logs: Float[Tensor, "*lines layer"]) -> Float[Tensor, "*lines"]:
    """The least-squares slope against the layer over the second half of the layers; -inf where a log
    there is. A weighted mean of the steps from layer to layer: between the least and the largest."""
    part = logs[..., (logs.shape[-1] - 1) // 2 :]
    layer = torch.arange(part.shape[-1], dtype=logs.dtype, device=logs.device)
    layer = layer - layer.mean()
    rate = (part.nan_to_num(neginf=0.0) * layer).sum(-1) / layer.square().sum()
    rate = rate.masked_fill(part.isnan().any(-1), torch.nan)
    return rate.masked_fill((part == -torch.inf).any(-1), -torch.inf)


def _refuse(arch: Architecture) -> None:
    if arch.parts or not isinstance(arch.kernel, str):
        raise ArchitectureError("no exponent is known of parts of one's own: measure instead", subject="parts")
    reason, kernel = outside(arch), arch.kernel.partition(":")[0]
    require(not reason, f"no exponent is known with {reason}: measure instead", ArchitectureError, "architecture")
    message = f"kernel {arch.kernel!r} has no exponent, {KERNELS.get(kernel)}: measure instead"
    require(kernel not in KERNELS, message, ArchitectureError, "kernel")
    message = f"positions must be none or absolute; got {arch.positions!r}: measure instead"
    alike = arch.positions in ("none", "absolute") or kernel == "uniform"
    require(alike, message, ArchitectureError, "positions")


def _spectrum(visible: Bool[Tensor, "token token"]) -> Modes:
    """Eigenvalues of the row-normalised mask, by strong components: between components the matrix is
    triangular, and eigenvalues of a triangular matrix, often many times the same, are known from its
    diagonal but found by no solver to more than a few digits."""
    import rustworkx as rx

    degree = visible.sum(-1).double()
    eigenvalues: list[complex] = []
    arrows = rx.PyDiGraph.from_adjacency_matrix(visible.double().numpy())
    for component in rx.strongly_connected_components(arrows):
        at = torch.tensor(sorted(component))
        M, degrees = visible[at][:, at].double(), degree[at]
        if len(at) == 1:
            values = (M / degrees)[0].to(torch.complex128)
        elif torch.equal(M, M.T):
            root = degrees.rsqrt()
            values = torch.linalg.eigvalsh(root[:, None] * M * root).to(torch.complex128)
        else:
            values = torch.linalg.eigvals(M / degrees[:, None])
        eigenvalues += [0j if abs(nu) < SAME else complex(nu.real, abs(nu.imag)) for nu in values.tolist()]
    eigenvalues.remove(min(eigenvalues, key=lambda nu: abs(nu - 1)))  # the common token's own
    distinct: list[complex] = []
    for nu in sorted(eigenvalues, key=lambda nu: (-abs(nu), -nu.real)):
        if not any(abs(nu - kept) < SAME for kept in distinct[-2:]):
            distinct.append(nu)
    return torch.tensor(distinct, dtype=torch.complex128)


def _growth(
    net: Transformer, x: Float[Tensor, " width"], modes: Modes
) -> tuple[Float[Tensor, "mode layer"], Float[Tensor, " layer"]]:
    """log of the size of every mode's product `G_nu G_nu ...` on the probes, and of the common token."""
    width, device = net.arch.width, net.device
    # Uniform attention among two: P0 itself, and no change of P to be rounded.
    arch = net.arch.replace(kernel="uniform", positions="none", mask="complete")
    common = Scaled.plain(x.to(device=device, dtype=torch.float64)[None]).normalised()
    nu = (modes if bool((modes.imag != 0).any()) else modes.real).to(device)[:, None, None]
    directions = torch.randn(width, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probes = torch.linalg.qr(directions).Q[: min(width, PROBES)]
    M = probes.to(device).to(nu.dtype).expand(len(modes), -1, -1)  # [mode, probe, width]
    size = torch.zeros(len(modes), dtype=torch.float64, device=device)
    sizes, lengths = [size], [log_length(common)]
    for index, layer in enumerate(net.weights.layers):
        common, still, total, log = _images(arch, index, layer, common, M)
        M = still + nu * (total - still)
        norm = torch.linalg.vector_norm(M, dim=(-2, -1))
        M = M / norm.masked_fill(norm == 0, 1.0)[:, None, None]
        size = size + norm.log() + log
        sizes.append(size)
        lengths.append(log_length(common))
    return torch.stack(sizes, -1), torch.cat(lengths)


def log_length(x: Scaled) -> Float[Tensor, " batch"]:
    """log of the Frobenius norm of each sample."""
    return torch.linalg.vector_norm(x.value.flatten(1), dim=1).log() + x.log


def _images(arch: Architecture, index: int, layer: Layer, x: Scaled, M: Tensor) -> tuple[Scaled, Tensor, Tensor, float]:
    """(next x, M G_0, M G_1, the log of both their units), by as few directions as will do."""
    rows = torch.view_as_real(M).movedim(-1, 0) if M.is_complex() else M[None]
    flat = rows.flatten(0, -2)  # [part * mode * probe, width]
    if len(flat) < arch.width:
        after, images, log = _derivatives(arch, index, layer, x, flat)
    else:
        basis = torch.eye(arch.width, dtype=flat.dtype, device=flat.device)
        after, images, log = _derivatives(arch, index, layer, x, basis)
        images = flat @ images
    still, total = (torch.complex(*part) if M.is_complex() else part[0] for part in images.view(2, *rows.shape))
    return after, still, total, log


def _derivatives(
    arch: Architecture, index: int, layer: Layer, x: Scaled, rows: Float[Tensor, "row width"]
) -> tuple[Scaled, Float[Tensor, "2 row width"], float]:
    """(next x, images of the rows under G_0 and G_1, the log of their unit).

    Each row r is a sample of two tokens, x + r and x - r with r infinitesimal, in deviation arithmetic:
    its rules are exact there, and x may have any size. Once both tokens see both, once each itself.
    """
    row_count = len(rows)
    low = BELOW + (2 * x.log.clamp(max=0.0)).masked_fill(x.log <= LOWEST, 0.0)  # far below x itself
    R = torch.stack([rows, -rows], 1).repeat(2, 1, 1)  # [2 row, token, width]
    valid = ValidTokens(torch.ones(R.shape[:2], dtype=torch.bool, device=R.device))
    both = torch.ones(row_count, 1, 2, 2, dtype=torch.bool, device=R.device)
    itself = torch.eye(2, dtype=torch.bool, device=R.device).expand_as(both)
    visible: dict[str | Mask, Tensor] = {"complete": torch.cat([both, itself])}
    settings = PassSettings(visible, rotary=(), sinusoids=None, bias=None, valid=valid.mask)
    common = Scaled(x.value.expand(2 * row_count, -1), x.log.expand(2 * row_count))
    state = State(common, Scaled(R, low.expand(2 * row_count)), valid)
    after = traverse(Block.of(arch, index, HeldLayers([layer]), 0), Deviation(arch, settings), state).state
    log = after.R.log - low
    top = log.amax()
    images = (after.R.value[:, 0] - after.R.value[:, 1]) / 2 * (log - top).exp()[:, None]
    return Scaled(after.x.value[:1], after.x.log[:1]), images.view(2, row_count, -1), float(top)
