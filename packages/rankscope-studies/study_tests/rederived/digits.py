"""Attention as it is defined, in thousands of decimal digits (mpmath): no deviations, no scales, no expansion."""

import mpmath

from study_tests.rederived.plain import Array, Heads


def by_digits(layers: list[Heads], X: Array, digits: int, norm: bool = False) -> list[float]:
    """log10 of what is left after each layer of attention (with `norm`, and a LayerNorm after it)."""
    with mpmath.workdps(digits):
        Y = mpmath.matrix(X.tolist())
        logs = []
        for layer in layers:
            d = layer.W_Q.shape[1] // layer.heads
            total = mpmath.zeros(Y.rows, Y.cols)
            for head in range(layer.heads):
                cut = slice(head * d, (head + 1) * d)
                q, k, v = (Y * mpmath.matrix(W[:, cut].tolist()) for W in (layer.W_Q, layer.W_K, layer.W_V))
                scores = q * k.T / mpmath.sqrt(d)
                P = scores.apply(mpmath.exp)
                for i in range(P.rows):
                    P[i, :] = P[i, :] / sum(P[i, j] for j in range(P.cols))
                total += P * (v * mpmath.matrix(layer.W_O[cut].tolist()))
            Y = total
            for i in range(Y.rows if norm else 0):
                centred = [Y[i, j] - sum(Y[i, :]) / Y.cols for j in range(Y.cols)]
                size = mpmath.sqrt(sum(entry**2 for entry in centred) / Y.cols)
                Y[i, :] = mpmath.matrix([[entry / size for entry in centred]])
            mean = [sum(Y[:, j]) / Y.rows for j in range(Y.cols)]
            rest = mpmath.sqrt(sum((Y[i, j] - mean[j]) ** 2 for i in range(Y.rows) for j in range(Y.cols)))
            logs.append(float(mpmath.log10(rest / mpmath.norm(Y))))
    return logs
