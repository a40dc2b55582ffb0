"""Values of the wrong Python type. Under jaxtyping's checks, which other tests run with, these are caught
first; users have no such checks, so a plain interpreter tries them."""

import subprocess
import sys

CASES = """
import torch, rankscope
from rankscope.metrics import Metric, residual
from rankscope.errors import RankscopeError
from rankscope.live.monitor.rules import Collapse

net = rankscope.Transformer.random(rankscope.Architecture(layers=1, width=4, heads=1))
encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(4, 1, batch_first=True), 2)
cases = [
    lambda: residual([[1.0, 2.0]]),
    lambda: residual(torch.ones(2, 2), centre="median"),
    lambda: rankscope.Architecture(layers=2.5, width=4, heads=1),
    lambda: rankscope.Architecture(layers=1, width=4, heads=1, experts=3),
    lambda: rankscope.Architecture(layers=1, width=4, heads=1, norm="batch"),
    lambda: net.run([[1.0]]),
    lambda: rankscope.measure(net, [[1.0]]),
    lambda: rankscope.Monitor("gpt2"),
    lambda: Collapse(action="shout"),
    lambda: rankscope.Monitor(encoder, probe=torch.randn(1, 2, 4), run="nowhere", alarms=[3]),
    lambda: net.variant(layers=[0.5]),
    lambda: net.variant(mask=[(0, 1, 2)]),
    lambda: rankscope.Architecture.from_dict({"layers": 1, "width": 4, "heads": 1, "kernel": 3}),
    lambda: rankscope.Architecture(layers=1, width=4, heads=1, parallel="no"),
    lambda: rankscope.Architecture(layers=1, width=4, heads=1, biases="query"),
    lambda: rankscope.Architecture(layers=1, width=4, heads=1, kept_heads=3),
    lambda: rankscope.Architecture(layers=1, width=4, heads=1, rotary_frequencies=0.5),
    lambda: rankscope.Architecture(layers=1, width=4, heads=1, parts=("a word",)),
    lambda: rankscope.fresh({"layers": 1, "width": 4, "heads": 1}),
    lambda: net.variant(heads=1),
    lambda: net.variant(skip="a"),
    lambda: net.variant(mask=3),
    lambda: rankscope.measure(net, torch.ones(1, 2, 4), [[True, False]]),
    lambda: rankscope.fresh("bert-tiny").encode([b"a whale"]),
    lambda: rankscope.fresh("bert-tiny").encode(None),
    lambda: rankscope.fresh("bert-tiny").encode("a whale", tokens=2.5),
    lambda: rankscope.fresh("bert-tiny").encode(torch.ones(1, 2).long(), padding=[[True, False]]),
    lambda: net.to("float32"),
    lambda: net.to(device="nowhere"),
    lambda: rankscope.watch(torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(4, 1), 2), layers=2),
    lambda: rankscope.watch("bert"),
    lambda: rankscope.Profile.join(rankscope.measure(net, torch.randn(1, 2, 4))),
    lambda: rankscope.Profile.join([rankscope.measure(net, torch.randn(1, 2, 4)), 1]),
    lambda: rankscope.decompose(net, torch.randn(1, 2, 4)).keep(lengths=1),
    lambda: rankscope.decompose(net, torch.randn(1, 2, 4)).keep(paths=(0,)),
    lambda: rankscope.decompose(net, torch.randn(1, 2, 4)).path(0),
    lambda: rankscope.certify(net, torch.randn(1, 2, 4)).of("dobrushin", "all"),
    lambda: Metric("mine", residual, of="words"),
    lambda: rankscope.measure(net, torch.randn(1, 2, 4), metrics=["mu", residual]),
    lambda: rankscope.measure(net, torch.randn(1, 2, 4), metrics=2),
    lambda: rankscope.measure(encoder, "a whale"),
    lambda: rankscope.certify(encoder, torch.randn(1, 2, 4)),
    lambda: rankscope.decompose("minilm", "a whale"),
    lambda: rankscope.measure(rankscope.fresh("bert-tiny"), "a whale", torch.zeros(1, 2).bool()),
    lambda: rankscope.measure(net, torch.ones(1, 2, 4).numpy()),
    lambda: rankscope.measure(net, torch.ones(1, 2, dtype=torch.long)),
    lambda: rankscope.decompose(net, {"input_ids": torch.ones(1, 2, dtype=torch.long)}),
    lambda: rankscope.certify(3, torch.ones(1, 2, 4)),
    lambda: net.variant("sam"),
]
for case in cases:
    try:
        case()
    except RankscopeError as error:
        print(f"{type(error).__name__}: {error}")
"""


LISTS = """
import rankscope

small = dict(layers=2, width=8, heads=2, positions="rotary", norm_place="pre")
lists = rankscope.Architecture(**small, kept_heads=[[0], []], rotary_frequencies=[[1, 0.5]], bare_layers=[0])
tuples = rankscope.Architecture(
    **small, kept_heads=((0,), ()), rotary_frequencies=((1, 0.5),), bare_layers=(0,)
)
print(lists == tuples and hash(lists) == hash(tuples))
"""


def test_an_architecture_of_lists_is_that_of_tuples() -> None:
    done = subprocess.run([sys.executable, "-c", LISTS], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_wrong_python_types_are_sentences() -> None:
    done = subprocess.run([sys.executable, "-c", CASES], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    expected = [
        ("TokensError", "tokens must be a torch tensor", "got list"),
        ("MetricError", "centre must be one of mean, midrange, argmin", "got 'median'"),
        ("ArchitectureError", "layers must be a whole number", "got 2.5"),
        ("ArchitectureError", "experts must be an Experts", "got 3"),
        ("ArchitectureError", "norm must be one of layer, rms, scale, none", "got 'batch'"),
        ("TokensError", "tokens must be a tensor [batch, token, width] of width 4", "received list"),
        ("TokensError", "tokens must be a floating tensor", "received list"),
        ("MonitorError", "a monitor takes a torch module", "received a str"),
        ("MonitorError", "action must be one of warn, stop, a function of the alarm", "got 'shout'"),
        ("MonitorError", "alarms must be rules: objects with on_measurement(rows, step)", "received a int"),
        ("ArchitectureError", "a list of layers 0..0", "got [0.5]"),
        ("MaskError", "a mask must be a string, a boolean tensor or a list of edges", "(0, 1, 2)"),
        ("ArchitectureError", "kernel must be a word", "got 3"),
        ("ArchitectureError", "parallel must be True or False", "got 'no'"),
        ("ArchitectureError", "biases must be True, False or a tuple of query", "got 'query'"),
        ("ArchitectureError", "kept_heads must be a tuple", "got 3"),
        ("ArchitectureError", "rotary_frequencies must be a tuple", "got 0.5"),
        ("ArchitectureError", "parts must be objects with a name, a place and a rule", "got 'a word'"),
        ("ArchitectureError", "model must be one of bert-tiny", "got {'layers': 1, 'width': 4, 'heads': 1}"),
        ("ArchitectureError", "heads must be a list of heads", "got 1"),
        ("ArchitectureError", "skip must be a number, True or False", "got 'a'"),
        ("MaskError", "a mask must be a string", "got 3"),
        ("TokensError", "padding must be a boolean tensor", "received list"),
        ("TokensError", "encode takes texts, or token ids as a tensor", "got a bytes"),
        ("TokensError", "encode takes texts, or token ids as a tensor", "got a NoneType"),
        ("TokensError", "tokens must be a whole number, at least 1", "got 2.5"),
        ("TokensError", "padding must be a boolean tensor", "received list"),
        ("ArchitectureError", "dtype must be a floating torch.dtype", "got 'float32'"),
        ("ArchitectureError", "device must be one that torch has on this machine", "got 'nowhere'"),
        ("WatchError", "layers must be a list", "got 2: write layers=[2]"),
        ("WatchError", "watch takes a torch module", "received a str"),
        ("MetricError", "join takes a list of profiles", "received one profile alone"),
        ("MetricError", "join takes a list of profiles", "received int in the place of a profile"),
        ("PathError", "lengths must be a list; got 1", "got 1: write [1]"),
        ("PathError", "a path is a row of heads and None", "got 0"),
        ("PathError", "a path is a row of heads and None", "got 0"),
        ("TheoremError", "sample must lie in 0..0", "got 'all'"),
        ("MetricError", "`of` of metric 'mine' must be one of tokens, attention, heads", "got 'words'"),
        ("MetricError", "metrics must be names or Metric objects", "received function"),
        ("MetricError", "metrics must be names or Metric objects", "received int"),
        ("SourceError", "a TransformerEncoder has no config", "watch measures any module as it is"),
        ("SourceError", "a TransformerEncoder has no config", "watch measures any module as it is"),
        ("SourceError", "decompose(load('minilm'), texts)"),
        ("TokensError", "padding goes with tokens; measure was given texts"),
        ("TokensError", "received ndarray: convert it with torch.from_numpy"),
        ("TokensError", "received torch.int64 of shape (1, 2)", "has an embedding"),
        ("TokensError", "received a dict of a tokenizer: give its ids", "attention_mask="),
        ("SourceError", "certify takes a network", "or a model of transformers; got a int"),
        ("ArchitectureError", "a variant must be 'transformer'", "got 'sam'"),
    ]
    assert len(said) == len(expected), done.stdout + done.stderr
    for line, words in zip(said, expected, strict=True):
        for word in words:
            assert word in line
