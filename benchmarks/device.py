"""On an accelerator: `python -m benchmarks.device [first ...]`, one section or all of them.

Deviation arithmetic, replayed and compiled, and `measure` against a float64 forward pass; the same numbers as
on the CPU; sums over paths and certificates; metrics against the card's copy bandwidth; 131,072 tokens; a Llama of 7B.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.timing import least_seconds
from rankscope.deviation import propagate
from rankscope.errors import TooLargeError
from rankscope.nets import Architecture, Transformer
from rankscope.nets.tensors import shapes
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
            "measure in bfloat16": {"arithmetic": "bfloat16", "batch": samples},
            "measure in float32": {"arithmetic": "float32", "batch": samples},
            f"measure, check=False, {samples} at a time": {"check": False, "batch": samples},
            f"measure, {samples} at a time": {"batch": samples},
            f"measure, {samples // 2} at a time": {"batch": samples // 2},
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
    "passes": passes, "agreement": agreement, "sums": sums, "metrics": metrics, "long": long, "size": size,
}  # fmt: skip

if __name__ == "__main__":
    main()
