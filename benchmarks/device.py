"""On an accelerator: `python -m benchmarks.device [first ...]`, one section or all of them.

Deviation arithmetic, replayed, and `measure` against a float64 forward pass; the same numbers as on the CPU; sums over
paths and certificates; metrics and kernels against the card's copy bandwidth; 131,072 tokens; a Llama of 7B.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.timing import least_seconds
from rankscope.deviation import propagate
from rankscope.deviation.decisions import Presuming, answering
from rankscope.errors import TooLargeError
from rankscope.nets import Architecture, Transformer, shapes
from rankscope.paths import freeze, length_terms
from rankscope.profiles import measure
from rankscope.sources import bundled_excerpts, preset, word_tokens
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
    measured = partial(measure, variant, X, batch_size=batch)
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


def kernels() -> None:
    """The kernels against torch's formulas on the CPU, and by how much of a copy's bandwidth they read."""
    from rankscope.deviation import softmax
    from rankscope.deviation.state import ValidTokens
    from rankscope.metrics.norms import token_norms

    _distances()
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
    plain = torch.cuda.CUDAGraph()
    with patch.object(softmax, "has_kernel", lambda D: False):
        make()  # what is set up at first use is not captured
        with answering(Presuming(dict.fromkeys(SHORTCUTS, 1))), torch.cuda.graph(plain):
            make()
    fused = torch.cuda.CUDAGraph()
    with answering(Presuming(dict.fromkeys(SHORTCUTS, 1))), torch.cuda.graph(fused):
        make()
    _bandwidth("softmax's deviations", of_rows[0], {"torch, replayed": plain.replay, "kernel, replayed": fused.replay})


def _distances() -> None:
    """Largest distances of rows of attention patterns."""
    from rankscope.metrics import largest_sum_distance

    for shape in [(2, 3, 1, 1), (2, 3, 33, 40), (12, 12, 128, 128), (1, 2, 700, 700)]:
        P, valid = torch.randn(shape, dtype=torch.float64), torch.rand(shape[:3]) < 0.7
        P[0, 0, -1, 0] = torch.nan
        for mask in (None, valid):
            there = largest_sum_distance(P.cuda(), None if mask is None else mask.cuda()).cpu()
            expected = largest_sum_distance(P, mask)
            off = float(((there - expected).abs() / expected.clamp(min=5e-324)).nan_to_num(0.0).max())
            same = torch.equal(there.isnan(), expected.isnan())
            print(
                f"  L1 distances of rows, {shape}, padding {mask is not None}: {off:.0e}, NaN alike {same}", flush=True
            )
    P = torch.randn(12, 12, 128, 128, dtype=torch.float64, device="cuda").softmax(-1)
    cases: dict[str, Callable[[], object]] = {"torch": partial(torch.cdist, P, P, p=1.0)}
    _bandwidth("L1 distances of rows", P, cases | {"kernel": partial(largest_sum_distance, P)})


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


LLAMA_7B = Architecture(
    layers=32, width=4096, heads=32, mask="causal", positions="rotary", mlp="gated", mlp_width=11008, activation="silu",
    norm="rms", norm_place="pre", norm_eps=1e-5, final_norm=True, biases=False,
)  # fmt: skip
"""The blocks of Llama 2 7B: 6.5 billion numbers."""
LONG_ENOUGH = 5.0  # seconds from which on a case runs once; others run again, warm


def size() -> None:
    """A random Llama of 7B in bfloat16, 8 x 2,048 tokens: measure, whole and as pure attention, beside plain passes."""
    print(SIZE_HEADER, flush=True)
    for line in size_rows(LLAMA_7B, 8, 2048, "cuda"):
        print(line, flush=True)


SIZE_HEADER = (
    "| case | seconds | / bfloat16 pass | / float32 pass | / float64 pass | GB at the peak |\n|---|---|---|---|---|---|"
)


def random_llama(arch: Architecture, device: str) -> Transformer:
    """A network with weights N(0, 0.02) in bfloat16, drawn where it runs."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("gain"):
            return torch.ones(shape, dtype=torch.bfloat16, device=device)
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device).mul_(0.02)

    return Transformer.from_weights(arch, {name: drawn(name, shape) for name, shape in shapes(arch).items()})


def size_rows(arch: Architecture, samples: int, tokens: int, device: str) -> Iterator[str]:
    """A row of a table in Markdown for each case: the network measured whole and as pure attention, beside its plain
    passes; memory is all that torch holds, weights included."""
    net = random_llama(arch, device)
    X = 0.02 * torch.randn(samples, tokens, arch.width, device=device)
    for name in ("transformer", "san"):
        variant, plain = net.variant(name), {}
        seconds, memory = _once(lambda variant=variant: variant.fingerprint, device, again=False)
        yield f"| {name}, its fingerprint | {seconds:.2f} | | | | {memory:.0f} |"
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            kind = str(dtype).removeprefix("torch.")
            seconds, memory = _once(partial(_plain_pass, variant.to(dtype), X.to(dtype)), device)
            plain[kind] = seconds
            yield _size_row(f"{name}, plain pass in {kind}", seconds, memory, plain)
        measured = partial(measure, variant, X)
        arithmetics: dict[str, dict[str, Any]] = {
            "measure in bfloat16": {"arithmetic": "bfloat16", "batch_size": samples},
            "measure in float32": {"arithmetic": "float32", "batch_size": samples},
            f"measure, check=False, {samples} at a time": {"check": False, "batch_size": samples},
            f"measure, {samples} at a time": {"batch_size": samples},
            f"measure, {samples // 2} at a time": {"batch_size": samples // 2},
        }
        for case, options in arithmetics.items():
            try:
                seconds, memory = _once(partial(measured, **options), device)
            except (TooLargeError, torch.OutOfMemoryError) as error:
                yield f"| {name}, {case} | {' '.join(str(error).split())[:150]} | | | | |"
                continue
            yield _size_row(f"{name}, {case}", seconds, memory, plain)


def _plain_pass(net: Transformer, X: torch.Tensor) -> None:
    with torch.no_grad():
        for _ in net.steps(X):
            pass


def _size_row(case: str, seconds: float, memory: float, plain: dict[str, float]) -> str:
    ratios = [f"{seconds / plain[kind]:.1f}" if kind in plain else "" for kind in ("bfloat16", "float32", "float64")]
    return f"| {case} | {seconds:.2f} | {' | '.join(ratios)} | {memory:.0f} |"


def _once(case: Callable[[], object], device: str, again: bool = True) -> tuple[float, float]:
    """(seconds, GB at the peak) of a case, warm where it is short."""
    on_card = device == "cuda"
    if on_card:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def taken() -> float:
        start = time.perf_counter()
        case()
        if on_card:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds = taken()
    if again and seconds < LONG_ENOUGH:
        seconds = taken()
    return seconds, torch.cuda.max_memory_allocated() / 1e9 if on_card else 0.0


SECTIONS = {
    "passes": passes, "agreement": agreement, "sums": sums, "metrics": metrics, "kernels": kernels, "long": long,
    "size": size,
}  # fmt: skip

if __name__ == "__main__":
    main()
