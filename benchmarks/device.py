"""On an accelerator: `python -m benchmarks.device [first ...]`, one section or all of them.

Deviation arithmetic, replayed, and `measure` against a float64 forward pass; the same numbers as on the CPU; sums over
paths and certificates; metrics and kernels against the card's copy bandwidth; 131,072 tokens.
"""

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product

import torch

from benchmarks.timing import least_seconds
from rankscope.deviation import propagate
from rankscope.deviation.decisions import Presuming, answering
from rankscope.nets import Architecture, Transformer
from rankscope.paths.frozen import freeze
from rankscope.paths.polynomials import length_terms
from rankscope.profiles import measure
from rankscope.sources.fresh import preset
from rankscope.sources.random_embedding import bundled_excerpts, word_tokens
from rankscope.theory import certify

WARM = 4
"""Passes before the clock runs: recorded, captured, replayed."""


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
    _ratios(cases, f"{batch} x 128, {name}")


def agreement() -> None:
    """The largest difference in log10 between readings there and on the CPU, of BERT-base."""
    net, X = _bert(4, "cpu")
    metrics = ["relative_residual", "mu", "mean_cosine_gap", "entropy"]
    for name in ("transformer", "san"):
        variant = net.variant(name)
        here = measure(variant, X, metrics=metrics)
        for _ in range(WARM):
            there = measure(variant, X, metrics=metrics, device="cuda")
        found = []
        for metric in metrics:
            a, b = (each.curve(metric, "log10") for each in (here, there))
            found.append(float(((a - b).abs() / a.abs().clamp(min=1.0)).nan_to_num(0.0).max()))
        said = ", ".join(f"{metric} {each:.0e}" for metric, each in zip(metrics, found, strict=True))
        print(f"  {name}: {said}", flush=True)


def sums() -> None:
    """Sums over paths by length, and certificates, BERT-base, 4 x 128 tokens."""
    net, X = _bert(4)
    cases: dict[str, Callable[[], object]] = {
        "plain": lambda: _walk(net.steps(X)),
        "by_length": lambda: _walk([length_terms(freeze(net, X))]),
        "certify": lambda: _walk([certify(net, X[:1], device="cuda")]),
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


def kernels() -> None:
    """The kernels against torch's formulas on the CPU, and by how much of a copy's bandwidth they read."""
    from rankscope.deviation import softmax
    from rankscope.deviation.state import ValidTokens
    from rankscope.metrics.token_norms import token_norms

    for shape, dtype in product([(3, 70, 130), (2, 1000, 770), (1, 5000, 64)], [torch.float64, torch.bfloat16]):
        for size in (1.0, 1e-200, 1e200) if dtype == torch.float64 else (1.0,):
            X = (size * (1 + torch.randn(shape, dtype=torch.float64))).to(dtype)
            for valid in (None, torch.rand(shape[:2]) < 0.7):
                there = token_norms(X.cuda(), None if valid is None else valid.cuda()).cpu()
                expected = token_norms(X, valid)
                off = float(((there - expected).abs() / expected.clamp(min=5e-324)).max())
                print(f"  norms of {shape}, {dtype}, {size:g}, padding {valid is not None}: {off:.0e}", flush=True)
    for shape, dtype in product([(64, 1024, 768), (4, 8192, 4096)], [torch.float64, torch.float32, torch.bfloat16]):
        X = torch.randn(shape, device="cuda").to(dtype)
        valid = torch.rand(shape[:2], device="cuda") < 0.9
        cases: dict[str, Callable[[], object]] = {"all": partial(token_norms, X)}
        _bandwidth(f"norms of {shape}, {dtype}", X, cases | {"with padding": partial(token_norms, X, valid)})
    D = torch.randn(32, 12, 128, 128, dtype=torch.float64)
    D[:, :, 5] = 0.0  # the reference row
    ref, log = torch.randn(32, 12, 128, dtype=torch.float64), torch.zeros(32, 12, dtype=torch.float64)
    visible, alike = torch.ones(32, 1, 128, 128, dtype=torch.bool), torch.ones(32, 12, dtype=torch.bool)
    results, given = [], [ref, log, visible[:, :, :1].expand(-1, 12, -1, -1), visible.any(2), alike]
    for device in ("cpu", "cuda"):
        of_rows = [t.to(device) for t in (D, visible)]
        shared = softmax.ReferenceRow.of(*(t.to(device) for t in given))
        make = partial(shared.changes, of_rows[0], of_rows[1], ValidTokens(visible[:, 0, 0].to(device)))
        results.append([t.cpu() for t in make()])
    (expected, a), (there, b) = results
    off = float(((there * (b - a).exp() - expected).abs() / (expected.abs() + 1e-3 * expected.abs().amax())).max())
    print(f"  softmax's deviations: {off:.0e}")
    has_kernel, softmax.has_kernel = softmax.has_kernel, lambda D: False
    make()  # what is set up at first use is not captured
    plain = torch.cuda.CUDAGraph()
    with answering(Presuming(dict.fromkeys(SHORTCUTS, 1))), torch.cuda.graph(plain):
        make()
    softmax.has_kernel = has_kernel
    fused = torch.cuda.CUDAGraph()
    with answering(Presuming(dict.fromkeys(SHORTCUTS, 1))), torch.cuda.graph(fused):
        make()
    _bandwidth("softmax's deviations", of_rows[0], {"torch, replayed": plain.replay, "kernel, replayed": fused.replay})


SHORTCUTS = [
    (0, f"softmax.{name}", 0) for name in ("far_of_kernel", "far", "top_seen", "nothing_alone", "unit_size", "complete")
]


def _bandwidth(what: str, X: torch.Tensor, cases: dict[str, Callable[[], object]]) -> None:
    """Print the bytes of X over the time of each case, as a share of the bandwidth of a copy, by the GPU's clock."""
    room, events = torch.empty_like(X), [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    taken = {}
    for name, case in {"copy": lambda: room.copy_(X), **cases}.items():
        rounds = []
        for _ in range(12):
            events[0].record()
            case()
            events[1].record()
            torch.cuda.synchronize()
            rounds.append(1e-3 * events[0].elapsed_time(events[1]))
        taken[name] = min(rounds)
    copied = 2 * X.nbytes / taken.pop("copy")
    for name, each in taken.items():
        share = X.nbytes / each / copied
        print(f"  {what}, {name}: {1e3 * each:.3f} ms, {share:4.0%} of the copy's {copied / 1e12:.2f} TB/s", flush=True)


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
    "passes": passes, "agreement": agreement, "sums": sums, "metrics": metrics, "kernels": kernels, "long": long,
}  # fmt: skip

if __name__ == "__main__":
    main()
