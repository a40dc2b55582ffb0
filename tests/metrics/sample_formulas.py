"""The formulas of collapse across samples as their authors write them, in numpy and loops, in float64."""

import numpy as np
from torch import Tensor


def rankme(Z: Tensor) -> float:
    s = np.linalg.svd(Z.double().numpy(), compute_uv=False)
    p = s / np.abs(s).sum() + 1e-7
    return float(np.exp(-np.sum(p * np.log(p))))


def alpha_req(Z: Tensor, first: int = 11, last: int = 50) -> float:
    values = np.linalg.eigvalsh(np.cov(Z.double().numpy().T, bias=True))[::-1]
    ranks = np.arange(first, last + 1)
    x, w = np.stack([-np.log(ranks), np.ones(len(ranks))], 1), np.diag(1 / ranks)
    return float(np.linalg.solve(x.T @ w @ x, x.T @ w @ np.log(values[first - 1 : last]))[0])


def lidar(views: Tensor) -> float:
    X = views.double().numpy()
    samples, count, width = X.shape
    centre = X.mean(1)
    B = sum(np.outer(m, m) for m in centre - centre.mean(0)) / samples
    W = sum(np.outer(e, e) for e in (X - centre[:, None]).reshape(-1, width)) / (samples * count)
    values, vectors = np.linalg.eigh(W + 1e-4 * np.eye(width))
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    eigenvalues = np.linalg.eigvalsh(root @ B @ root).clip(0)
    p = eigenvalues / eigenvalues.sum() + 1e-8
    return float(np.exp(-np.sum(p * np.log(p))))


def uniformity(Z: Tensor) -> float:
    X = Z.double().numpy()
    X = X / np.linalg.norm(X, axis=1, keepdims=True)
    pairs = [np.exp(-2 * np.sum((X[i] - X[j]) ** 2)) for i in range(len(X)) for j in range(i)]
    return float(np.log(np.mean(pairs)))


def alignment(Z: Tensor, other: Tensor) -> float:
    X, Y = (z.double().numpy() for z in (Z, other))
    X, Y = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (X, Y))
    return float(np.mean(np.sum((X - Y) ** 2, axis=1)))
