"""On an accelerator: `python -m benchmarks.device [first ...]`, one section or all of them.

Deviation arithmetic, replayed and compiled, and `measure` against a float64 forward pass; the same numbers as
on the CPU; sums over paths and certificates; metrics against the card's copy bandwidth; 131,072 tokens.
"""

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product

import torch

from benchmarks.timing import least_seconds
from rankscope.deviation import propagate
from rankscope.nets import Architecture, Transformer
from rankscope.paths.frozen import freeze
from rankscope.paths.polynomials import length_terms
from rankscope.profiles import measure
from rankscope.sources.fresh import preset
from rankscope.sources.random_embedding import bundled_excerpts, word_tokens
from rankscope.theory import certify

WARM = 6
"""Passes before the clock runs: asked, captured, settled, compiled."""


def main() -> None:
    """Run the sections that are named, or all."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in sys.argv[1:] or SECTIONS:
        print(f"\n{name}: {SECTIONS[name].__doc__}", flush=True)
        SECTIONS[name]()


def _bert(batch: int, device: str = "cuda") -> tuple[Transformer, torch.Tensor]:
    net = Transformer.random(preset("bert-base"), device=device)
    X, _ = word_tokens(bundled_excerpts(128)[:batch], net.arch.width, 128)
    return net, X.to(device, torch.float64)


@torch.no_grad()
def _walk(steps: Iterable[object]) -> None:
    for _ in steps:
        pass
    torch.cuda.synchronize()


def _ratios(cases: dict[str, Callable[[], object]], about: str) -> None:
    for case in cases.values():
        for _ in range(WARM):
            case()
    seconds = least_seconds(cases)
    plain = seconds.pop("plain")
    for name, each in seconds.items():
        print(f"  {about}, {name:32} / float64 forward, {1e3 * plain:5.1f} ms  {each / plain:6.2f}", flush=True)


def passes() -> None:
    """Deviation arithmetic and measure, BERT-base x 128 tokens."""
    for batch, name in product((4, 32), ("transformer", "san")):
        _passes(batch, name)


def _passes(batch: int, name: str) -> None:
    net, X = _bert(batch)
    variant = net.variant(name)
    measured = partial(measure, variant, X, batch=batch)
    cases: dict[str, Callable[[], object]] = {
        "plain": lambda: _walk(variant.steps(X)),
        "deviation": lambda: _walk(propagate(variant, X)),
        "measure, check=False": partial(measured, check=False),
        "measure": measured,
    }
    if name == "transformer":
        cases |= {
            "deviation, compiled": lambda: _walk(propagate(variant, X, compile=True)),
            "measure, check=False, compiled": partial(measured, check=False, compile=True),
            "measure, compiled": partial(measured, compile=True),
        }
    _ratios(cases, f"{batch} x 128, {name}")


def agreement() -> None:
    """The largest difference in log10 between readings there and on the CPU, of BERT-base."""
    net, X = _bert(4, "cpu")
    metrics = ["relative_residual", "mu", "mean_cosine_gap", "entropy"]
    for name, compile in product(("transformer", "san"), (False, True)):
        variant = net.variant(name)
        here = measure(variant, X, metrics=metrics)
        for _ in range(WARM):
            there = measure(variant, X, metrics=metrics, device="cuda", compile=compile)
        found = []
        for metric in metrics:
            a, b = (each.curve(metric, "log10") for each in (here, there))
            found.append(float(((a - b).abs() / a.abs().clamp(min=1.0)).nan_to_num(0.0).max()))
        said = ", ".join(f"{metric} {each:.0e}" for metric, each in zip(metrics, found, strict=True))
        print(f"  {name}{', compiled' if compile else ''}: {said}", flush=True)


def sums() -> None:
    """Sums over paths by length, and certificates, BERT-base, 4 x 128 tokens."""
    net, X = _bert(4)
    cases: dict[str, Callable[[], object]] = {
        "plain": lambda: _walk(net.steps(X)),
        "by_length": lambda: _walk([length_terms(freeze(net, X))]),
        "certify": lambda: _walk([certify(net, X, device="cuda")]),
    }
    _ratios(cases, "4 x 128")


def metrics() -> None:
    """Metrics of tokens, 64 x 1,024 x 768 in float64: bytes read a second, as a share of a copy's."""
    from rankscope.metrics import metric

    X = torch.randn(64, 1024, 768, dtype=torch.float64, device="cuda")
    room = torch.empty_like(X)
    padding = torch.zeros(X.shape[:2], dtype=torch.bool, device="cuda")

    def timed(case: Callable[[], object]) -> Callable[[], None]:
        return lambda: _walk([case()])

    names = ["mu", "relative_mu", "residual", "relative_residual", "mean_cosine_gap", "high_frequency_share"]
    cases = {name: timed(lambda name=name: metric(name).compute(X, padding)) for name in names}
    seconds = least_seconds({"copy": timed(lambda: room.copy_(X)), **cases})
    copied = 2 * X.nbytes / seconds.pop("copy")
    print(f"  copy {copied / 1e12:.2f} TB/s")
    for name, each in seconds.items():
        print(f"  {name:24} {1e3 * each:6.2f} ms, {X.nbytes / each / copied:5.0%} of the copy's", flush=True)


def long() -> None:
    """A small GPT, 4 layers of width 256 in 4 heads, float32: tokens alone, and with entropy and sinks."""
    arch = Architecture(layers=4, width=256, heads=4, mask="causal", positions="rotary")
    net = Transformer.random(arch, dtype=torch.float32, device="cuda")
    tokens = ["relative_residual", "mu"]
    for number, names in product((16_384, 131_072), (tokens, [*tokens, "entropy", "first_token_mass"])):
        X = torch.randn(1, number, arch.width, device="cuda")
        measure(net, X[:, :1024], metrics=names, arithmetic="float32")
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        measure(net, X, metrics=names, arithmetic="float32")
        torch.cuda.synchronize()
        taken, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30
        print(f"  {number:7,} tokens, {len(names)} metrics: {taken:6.2f} s, {peak:5.2f} GB", flush=True)


SECTIONS = {
    "passes": passes, "agreement": agreement, "sums": sums, "metrics": metrics, "long": long,
}  # fmt: skip

if __name__ == "__main__":
    main()
