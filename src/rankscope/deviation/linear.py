"""Scores of the linear kernel: `log phi(q_i) . phi(k_j)`, `phi = elu + 1`, split as `scores.py` needs them.

Called by `scores.py` (`log_weights`, and `whole_log_weights` where positions rotate queries and keys).
With `phi(q_i) = f (1 + r_i)` and `phi(k_j) = g (1 + t_j)`, entry by entry, about those of the common token,
shares `w_c = f_c g_c / f . g`, and means and covariances under these shares,

    log phi(q_i) . phi(k_j) = [constant along the row] + [ref_j = log1p(mean t_j)] + [D_ij = log1p(u_ij)],
    u_ij = cov(r_i, t_j) / ((1 + mean r_i) (1 + mean t_j)):

D is of order e^{2s}, as that of a softmax is. Nothing nearly equal is subtracted, in phi neither:

    phi(z + d) / phi(z) - 1 = d / (1 + z) | expm1(d) | (expm1(z + d) - z) / (1 + z) | (z + d - expm1(z)) e^-z

where both ends are above zero, both below, the second below, the first below. Where tokens are so far apart
that such a ratio leaves the range, weights are sums of logs instead.
"""

import torch
from torch import Tensor

from rankscope.deviation.activations import over
from rankscope.deviation.decisions import must_compute
from rankscope.deviation.scaled import STEEPEST, Scaled, chosen, spread
from rankscope.nets import linear_logs

FAR = 150.0  # logs of ratios of phi from which on scores are formed as sums of logs
LARGE = 0.5  # the |u| above which log(1 + u) is taken as the log of 1 + u


def log_weights(q: Scaled, dq: Scaled, k: Scaled, dk: Scaled) -> tuple[Scaled, Scaled]:
    """Return `log phi(q_i) . phi(k_j)`, `phi = elu + 1`, as `(ref, D)`: ref_j + D_ij up to a constant of each row.

    Common queries q and keys k are `[batch, head, width]`, dq and dk what tokens add, `[batch, head, token, width]`.
    By the covariance of r_i and t_j (the module's docstring has the formula); of heads beyond FAR as sums of logs.
    """
    (Zq, Wq, r), (Zk, Wk, t) = _ratios(q, dq), _ratios(k, dk)
    share = (_log_phi(Zq) + _log_phi(Zk)).softmax(-1)  # [batch, head, 1, width]
    along, across = (part.mapped(lambda v: v @ share.mT) for part in (r, t))  # means, [batch, head, token, 1]
    logs = [_log_phi(W) - _log_phi(Z) for Z, W in ((Zq, Wq), (Zk, Wk))]  # of phi(z + d) / phi(z)
    F, G = (log.clamp(-FAR, FAR).exp() for log in logs)
    rows, columns = F @ share.mT, G @ share.mT  # 1 + mean r_i, 1 + mean t_j
    covariance = (r.value - along.value) * share @ (t.value - across.value).mT
    if share.shape[-1] == 1:  # weights are products of one number of i and one of j: rows are alike
        covariance = covariance * 0.0
    product = rows * columns.mT
    u = Scaled(covariance / product, r.log + t.log)
    ref, D = _log(across, columns).mapped(lambda v: v[..., 0]), _log(u, F * share @ G.mT / product)
    far = torch.stack([log.abs().flatten(2).amax(-1) for log in logs]).amax(0) > FAR  # [batch, head]
    if not must_compute("linear.far", far):
        return ref, D
    zero = Scaled(torch.zeros_like(ref.value), torch.zeros_like(ref.log))
    return chosen(far, zero, ref), chosen(far, whole_log_weights(Wq, Wk), D)


def whole_log_weights(q: Tensor, k: Tensor) -> Scaled:
    """The scores as sums of logs, of queries and keys `[batch, head, token, width]` as they are."""
    return Scaled(linear_logs(q, k), q.new_zeros(q.shape[:2])).normalised()


def _ratios(z: Scaled, d: Scaled) -> tuple[Tensor, Tensor, Scaled]:
    """Return z, z + d and `phi(z + d) / phi(z) - 1`, `phi = elu + 1`, by the four cases of the module's docstring.

    Where z or d is beyond float64's range, all are in units of `e^cut`, in which phi is linear or zero.
    """
    cut = (torch.maximum(z.log, d.log) - STEEPEST).clamp(min=0.0)  # there phi is linear or gone
    Z, step = z.at(cut)[:, :, None], Scaled(d.value, d.log - cut)
    D = step.explicit()
    W = Z + D
    high, up = Z >= 0, 1 + Z.clamp(min=0.0)
    down = (-Z).clamp(0.0, FAR).exp()
    below = over(torch.expm1(D.clamp(max=FAR)), D)
    inverse = 1 / D.masked_fill(D == 0, 1.0)
    crossing = torch.where(high, (torch.expm1(W.clamp(max=0.0)) - Z) / up, (W - torch.expm1(Z.clamp(max=0.0))) * down)
    alike = torch.where(high, 1 / up, below)
    slope = torch.where(high == (W >= 0), alike, crossing * inverse)
    return Z, W, Scaled(step.value * slope, step.log)


def _log_phi(z: Tensor) -> Tensor:
    """log(elu(z) + 1)."""
    return torch.where(z >= 0, torch.log1p(z.clamp(min=0.0)), z)


def _log(u: Scaled, ratio: Tensor) -> Scaled:
    """The log of 1 + u; where |u| is large, of `ratio`, which is 1 + u computed otherwise."""
    u = u.normalised()
    size = spread(u.log.clamp(-STEEPEST, STEEPEST).exp(), u.value)
    U = u.value * size
    near = u.value * over(torch.log1p(U.clamp(min=-LARGE)), U)
    return Scaled(torch.where(U.abs() > LARGE, ratio.log() / size, near), u.log)
