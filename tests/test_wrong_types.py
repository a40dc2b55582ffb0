"""Values of the wrong Python type. Under jaxtyping's checks, which other tests run with, these are caught
first; users have no such checks, so a plain interpreter tries them."""

import subprocess
import sys

import pytest

CASES = """
import torch, rankscope
from rankscope.metrics import Metric, residual
from rankscope.metrics.samples import alignment, rankme
from rankscope.errors import RankscopeError
from rankscope.monitor.alarm_rules import Collapse

net = rankscope.Transformer.random(rankscope.Architecture(layers=1, width=4, heads=1))
encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(4, 1, batch_first=True), 2)
cases = [
    ("TokensError", "X", lambda: residual([[1.0, 2.0]])),
    ("MetricError", "centre", lambda: residual(torch.ones(2, 2), centre="median")),
    ("ArchitectureError", "layers", lambda: rankscope.Architecture(layers=2.5, width=4, heads=1)),
    ("ArchitectureError", "experts", lambda: rankscope.Architecture(layers=1, width=4, heads=1, experts=3)),
    ("ArchitectureError", "norm", lambda: rankscope.Architecture(layers=1, width=4, heads=1, norm="batch")),
    ("TokensError", "X", lambda: net.run([[1.0]])),
    ("TokensError", "X", lambda: rankscope.measure(net, [[1.0]])),
    ("MonitorError", "model", lambda: rankscope.Monitor("gpt2")),
    ("MonitorError", "action", lambda: Collapse(action="shout")),
    ("MonitorError", "alarms",
        lambda: rankscope.Monitor(encoder, probe=torch.randn(1, 2, 4), run="nowhere", alarms=[3])),
    ("ArchitectureError", "layers", lambda: net.variant(layers=[0.5])),
    ("MaskError", "mask", lambda: net.variant(mask=[(0, 1, 2)])),
    ("ArchitectureError", "kernel",
        lambda: rankscope.Architecture.from_dict({"layers": 1, "width": 4, "heads": 1, "kernel": 3})),
    ("ArchitectureError", "parallel", lambda: rankscope.Architecture(layers=1, width=4, heads=1, parallel="no")),
    ("ArchitectureError", "biases", lambda: rankscope.Architecture(layers=1, width=4, heads=1, biases="query")),
    ("ArchitectureError", "kept_heads", lambda: rankscope.Architecture(layers=1, width=4, heads=1, kept_heads=3)),
    ("ArchitectureError", "rotary_frequencies",
        lambda: rankscope.Architecture(layers=1, width=4, heads=1, rotary_frequencies=0.5)),
    ("ArchitectureError", "parts", lambda: rankscope.Architecture(layers=1, width=4, heads=1, parts=("a word",))),
    ("ArchitectureError", "model", lambda: rankscope.fresh({"layers": 1, "width": 4, "heads": 1})),
    ("ArchitectureError", "heads", lambda: net.variant(heads=1)),
    ("ArchitectureError", "attention_skip", lambda: net.variant(skip="a")),
    ("MaskError", "mask", lambda: net.variant(mask=3)),
    ("ArchitectureError", "mlp", lambda: net.variant(mlp=None)),
    ("ArchitectureError", "norm", lambda: net.variant(norm=2)),
    ("TokensError", "Z", lambda: rankme(torch.ones(3))),
    ("TokensError", "Z", lambda: rankme(torch.ones(2, 3, dtype=torch.int64))),
    ("TokensError", "other", lambda: alignment(torch.ones(4, 2), torch.ones(3, 2))),
    ("TokensError", "padding", lambda: rankscope.measure(net, torch.ones(1, 2, 4), [[True, False]])),
    ("TokensError", "texts", lambda: rankscope.fresh("bert-tiny").encode([b"a whale"])),
    ("TokensError", "texts", lambda: rankscope.fresh("bert-tiny").encode(None)),
    ("TokensError", "max_length", lambda: rankscope.fresh("bert-tiny").encode("a whale", max_length=2.5)),
    ("TokensError", "padding",
        lambda: rankscope.fresh("bert-tiny").encode(torch.ones(1, 2).long(), padding=[[True, False]])),
    ("ArchitectureError", "dtype", lambda: net.to("float32")),
    ("ArchitectureError", "device", lambda: net.to(device="nowhere")),
    ("WatchError", "layers",
        lambda: rankscope.watch(torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(4, 1), 2), layers=2)),
    ("WatchError", "model", lambda: rankscope.watch("bert")),
    ("MetricError", "profiles", lambda: rankscope.Profile.join(rankscope.measure(net, torch.randn(1, 2, 4)))),
    ("MetricError", "profiles", lambda: rankscope.Profile.join([rankscope.measure(net, torch.randn(1, 2, 4)), 1])),
    ("PathError", "lengths", lambda: rankscope.decompose(net, torch.randn(1, 2, 4)).keep(lengths=1)),
    ("PathError", "path", lambda: rankscope.decompose(net, torch.randn(1, 2, 4)).keep(paths=(0,))),
    ("PathError", "path", lambda: rankscope.decompose(net, torch.randn(1, 2, 4)).path(0)),
    ("TheoremError", "sample", lambda: rankscope.certify(net, torch.randn(1, 2, 4)).of("dobrushin", "all")),
    ("MetricError", "of", lambda: Metric("mine", residual, of="words")),
    ("MetricError", "metrics", lambda: rankscope.measure(net, torch.randn(1, 2, 4), metrics=["mu", residual])),
    ("MetricError", "metrics", lambda: rankscope.measure(net, torch.randn(1, 2, 4), metrics=2)),
    ("SourceError", "source", lambda: rankscope.measure(encoder, "a whale")),
    ("SourceError", "source", lambda: rankscope.certify(encoder, torch.randn(1, 2, 4))),
    ("SourceError", "net", lambda: rankscope.decompose("minilm", "a whale")),
    ("TokensError", "padding",
        lambda: rankscope.measure(rankscope.fresh("bert-tiny"), "a whale", torch.zeros(1, 2).bool())),
    ("TokensError", "X", lambda: rankscope.measure(net, torch.ones(1, 2, dtype=torch.long))),
    ("TokensError", "X", lambda: rankscope.decompose(net, {"input_ids": torch.ones(1, 2, dtype=torch.long)})),
    ("SourceError", "net", lambda: rankscope.certify(3, torch.ones(1, 2, 4))),
    ("ArchitectureError", "variant", lambda: net.variant("sam")),
]
for kind, subject, case in cases:
    try:
        case()
    except RankscopeError as error:
        assert (type(error).__name__, error.subject) == (kind, subject), f"{kind} about {subject}: {error!r}"
        assert str(error), "an error says what was expected, what came and what to do"
    else:
        raise AssertionError(f"no {kind} about {subject}")

small = dict(layers=2, width=8, heads=2, positions="rotary", norm_place="pre")
lists = rankscope.Architecture(**small, kept_heads=[[0], []], rotary_frequencies=[[1, 0.5]], bare_layers=[0])
tuples = rankscope.Architecture(
    **small, kept_heads=((0,), ()), rotary_frequencies=((1, 0.5),), bare_layers=(0,)
)
assert lists == tuples and hash(lists) == hash(tuples)
"""
"""Each with the class of the error and what it is about; then what is as good as the right type."""


@pytest.mark.slow
def test_wrong_python_types_are_errors_that_name_their_subject_and_lists_are_tuples() -> None:
    done = subprocess.run([sys.executable, "-c", CASES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
