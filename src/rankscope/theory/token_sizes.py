"""Sizes of the tokens at a layer, by sample: the residual in several norms, its diameter, the shortest cosine.

Called by `observation.py`, which keeps them as `TokenSizes` (`facts.py`).
"""

import torch
from torch import Tensor

from rankscope.deviation import LOWEST, DeviationStep, Scaled, State, can_skip
from rankscope.deviation.norms import normalise
from rankscope.deviation.readings import read
from rankscope.errors import TokensError
from rankscope.metrics import (
    FARTHEST,
    NORMS,
    Tokens,
    largest_square_distance,
    max_cosine_gap,
    metric,
    min_cosine,
    tokens_of,
    unit_of,
)
from rankscope.nets import NormWeights
from rankscope.theory.facts import Centre, PerSample, TokenSizes
from rankscope.theory.logs import TEN, log, logs_of, sized

NOISE_SHARE = 1e-3  # The share of rounding in a float64 residual above which it is called noise


def token_sizes(state: State, centre: Centre, by_floats: bool) -> TokenSizes[PerSample]:
    """The sizes of the tokens of a state.

    Args:
        state: Tokens without padding.
        centre: What residuals are about.
        by_floats: Whether the tokens come from a float64 pass, which loses what they differ by where that is little.
    """
    if not can_skip("token_sizes.finite", state.scaled_tokens.isfinite().all()):
        sentence = "tokens and weights must be finite to be certified; NaN or infinity came out of a layer"
        raise TokensError(f"{sentence}: certify net.variant(layers=...), the layers before it", subject="X")
    R, all_tokens = sized(state.centred()[1]), sized(Scaled.plain(state.scaled_tokens))
    lengths = torch.linalg.vector_norm(all_tokens.value, dim=-1)
    unit = all_tokens.log + state.log

    def of_residual(size: Tensor) -> PerSample:
        return logs_of(size, R.log).clamp(min=LOWEST).masked_fill(state.equal, -torch.inf)

    mu = of_residual(torch.linalg.vector_norm(R.value, dim=(1, 2)))
    residual = of_residual(NORMS["composite"](R.value)) if centre == "mean" else log_about_argmin(state)
    composite = logs_of(NORMS["composite"](all_tokens.value), unit)
    frobenius = logs_of(torch.linalg.vector_norm(all_tokens.value, dim=(1, 2)), unit)
    if by_floats:
        noise = mu - frobenius < log(unit_of(torch.float64) / NOISE_SHARE)
    else:
        noise = (mu.abs() > FARTHEST) & ~state.equal | mu.isnan()
    shortest, longest = logs_of(lengths.amin(-1), unit), logs_of(lengths.amax(-1), unit)
    ready, _ = tokens_of(state.scaled_tokens, state.valid.mask, unpadded=True)
    return TokenSizes(
        residual, mu, diameter=logs_of(largest_square_distance(R.value).sqrt(), R.log),
        of_tokens={"residual": composite, "mu": frobenius, "diameter": longest}, shortest=shortest,
        longest=longest, cosine=min_cosine(ready), log_cosine_gap=_log_cosine_gap(state, ready), noise=noise,
    )  # fmt: skip


def log_about_argmin(state: State) -> PerSample:
    """log of `||res X||_{1,inf}` about the minimising centre."""
    reading = read(metric("residual@argmin"), DeviationStep(0, state, None))
    assert reading is not None
    return reading.log10 * TEN


def _log_cosine_gap(state: State, ready: Tokens) -> PerSample:
    """log of the largest `1 - cos(x_i, x_j)`: close tokens' from what their directions differ by."""
    u = normalise(state, "scale", NormWeights(), 0.0).residual
    close = logs_of(largest_square_distance(u.value) / 2, 2 * u.log)
    apart = max_cosine_gap(ready).log()
    return torch.where(state.x.log > LOWEST, close.masked_fill(state.equal, -torch.inf), apart)
