"""Routing of running mixtures of experts: counted from what their routers say, padding left out."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import rankscope
from rankscope.errors import WatchError
from rankscope.live.state_readings import routing_in
from rankscope.monitor import Monitor
from rankscope.trainings import read_training
from rankscope.trainings.signals import run_events
from tests.live.families import HEADS, LAYERS, WIDTH, seen, tiny
from tests.live.gpt import GPT, Block, words
from tests.raising import raises

METRICS = ["expert_load", "expert_entropy"]
IDS = words(3, 7)
REAL = torch.ones(3, 7, dtype=torch.bool)
REAL[1, 5:] = False
REAL[2, :3] = False
TWO: dict[str, Any] = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
FEW: dict[str, Any] = {**TWO, "moe_intermediate_size": 12}
SHARED: dict[str, Any] = {**FEW, "num_experts": 5, "shared_expert_intermediate_size": 8, "mlp_only_layers": [1]}
LATENT: dict[str, Any] = {
    **FEW, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
MODELS = {
    "mixtral": tiny(hf.MixtralModel, num_key_value_heads=2, num_local_experts=4),
    "qwen2_moe": tiny(hf.Qwen2MoeModel, **SHARED),
    "qwen3_moe": tiny(hf.Qwen3MoeForCausalLM, **FEW, num_experts=6, head_dim=4),
    "olmoe": tiny(hf.OlmoeForCausalLM, **TWO, num_experts=5),
    "gpt_oss": tiny(hf.GptOssModel, **TWO, num_local_experts=4, head_dim=8),
    "deepseek_v3": tiny(hf.DeepseekV3Model, **LATENT),
}  # fmt: skip


def built(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn_like(weight)
    return model


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_loads_are_counted_from_what_the_experts_were_given(name: str) -> None:
    """The experts' own arguments, not the router's output, say which were chosen."""
    model = built(name)
    taken: dict[int, Tensor] = {}
    stack = model.base_model.layers
    for layer, block in enumerate(stack, start=1):
        for part in block.modules():
            if type(part).__name__.endswith("Experts"):
                part.register_forward_pre_hook(
                    lambda module, args, layer=layer: taken.update({layer: args[1].reshape(*IDS.shape, -1)})
                )
    given = {"input_ids": IDS, "attention_mask": REAL.long()}
    plain = model(**given)[0]
    with rankscope.watch(model, METRICS) as w:
        assert torch.equal(model(**given)[0], plain)
    assert taken
    profile = w.profile()
    assert {*profile.table["layer"].unique()} == {*taken}
    for layer, chosen in taken.items():
        for sample in range(3):
            counts = Counter(chosen[sample][REAL[sample]].flatten().tolist())
            shares = [number / counts.total() for number in counts.values()]
            load = max(counts.values()) / int(REAL[sample].sum())
            assert float(profile.curve("expert_load")[sample, layer]) == pytest.approx(load)
            entropy = -sum(share * math.log(share) for share in shares)
            assert float(profile.curve("expert_entropy")[sample, layer]) == pytest.approx(entropy)


@pytest.mark.parametrize("probed", [False, True])
def test_a_monitor_has_the_routing_of_a_training(probed: bool, tmp_path: Path) -> None:
    """As a watch before the first step sees it."""
    model = built("mixtral").train(not probed)
    expected = seen(model, METRICS, IDS).profile()
    probe = {"input_ids": IDS} if probed else None
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with Monitor(model, ["mu", *METRICS], every=1, probe=probe, run=tmp_path / "run", alarms=()) as monitor:
        model.train()(IDS)[0].square().mean().backward()
        optimizer.step()
        monitor.step()
    rows = rankscope.read(monitor.run).tables["training"]
    first = rows["step"].min()
    for metric in METRICS:
        found = rows.filter(metric=metric, step=first).sort("layer")
        assert found["layer"].to_list() == [1, 2, 3]
        mean = expected.curve(metric)[:, 1:].mean(0)
        assert found["value"].to_list() == pytest.approx(mean.tolist(), rel=1e-12)


@pytest.mark.slow
def test_routers_that_send_all_tokens_one_way_are_found_before_a_spike(tmp_path: Path) -> None:
    """The order of events of a run has the load of experts, as of any other metric."""
    model = built("mixtral")
    with Monitor(model, METRICS, every=1, probe={"input_ids": IDS}, run=tmp_path / "run", alarms=()) as monitor:
        for step in range(1, 121):
            if step == 105:
                with torch.no_grad():
                    for block in model.layers:
                        block.mlp.gate.weight.zero_()  # of equal scores the first two experts are the best
            monitor.step(loss=2 + 0.01 * math.sin(step) + 3 * (step == 110))
    training = read_training(tmp_path / "run")
    report = run_events(training)
    assert report is not None and [spike.first for spike in report.spikes] == [110]
    before = training.table.filter(metric="expert_load", step=104)
    could_rise = before.filter(pl.col("value") < 1)["layer"].to_list()
    sure = report.sure(0).select("signal", "layer", "lead", "direction").rows()
    assert sorted(sure) == sorted([
        *(("expert_entropy", layer, 5, -1) for layer in (1, 2, 3)), *(("expert_load", k, 5, 1) for k in could_rise),
    ]) and len(could_rise) > 1  # fmt: skip


class Gate(nn.Module):
    """A router of one's own, of its own name."""

    def __init__(self, rows: int = 1) -> None:
        super().__init__()
        self.scores, self.rows = nn.Linear(WIDTH, 3, bias=False), rows

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.scores(x)[:, :: self.rows]
        return (scores, *scores.softmax(-1).topk(1))


class Gated(Block):
    """One expert of three for each token, after attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.experts = Gate(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        _, weights, chosen = self.gate(self.ln_2(x))
        said = torch.stack([expert(x) for expert in self.experts], -2)
        index = chosen[..., None].expand(*chosen.shape, WIDTH)
        return x + (weights[..., None] * said.gather(-2, index)).sum(-2)


def test_a_router_written_by_hand() -> None:
    model = GPT(block=Gated).double().eval()
    w = seen(model, [*METRICS, "entropy"], words())
    assert w.profile().curve("entropy").shape == (2, LAYERS + 1, HEADS)
    load = w.profile().curve("expert_load")[:, 1:]
    assert ((load >= 1 / 3) & (load <= 1)).all()
    with torch.no_grad(), rankscope.watch(model, "expert_load", layers=[0, 2]) as w:
        model(words())
    assert {*w.profile().table["layer"]} == {2}
    torch.testing.assert_close(w.profile().curve("expert_load")[:, 2], load[:, 1])


class Twice(Gated):
    def forward(self, x: Tensor) -> Tensor:
        self.gate(x)
        return super().forward(x)


class Sparse(Gated):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate = Gate(rows=2)

    def forward(self, x: Tensor) -> Tensor:
        self.gate(x)
        return x + self.attn(self.ln_1(x))


@pytest.mark.parametrize(("block", "subject"), [(Block, "routing"), (Sparse, "routing"), (Twice, "blocks")])
def test_what_is_no_routing_of_the_tokens_is_refused(block: type[nn.Module], subject: str) -> None:
    with raises(WatchError, subject=subject):
        seen(GPT(block=block).double().eval(), "expert_load", words())


class Dropping(nn.Module):
    """A router that drops tokens whose best expert is sure of itself: no expert, written -1, with weights left over."""

    def __init__(self, nowhere: int = -1) -> None:
        super().__init__()
        self.scores, self.nowhere = nn.Linear(WIDTH, 3, bias=False), nowhere

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.scores(x)
        weights, chosen = scores.softmax(-1).topk(2)
        self.chosen = torch.where(weights[..., :1] > 0.9, self.nowhere, chosen)
        return scores, weights, self.chosen


class Dropped(Block):
    def __init__(self, dropout: float = 0.0, nowhere: int = -1) -> None:
        super().__init__()
        self.gate = Dropping(nowhere)

    def forward(self, x: Tensor) -> Tensor:
        self.gate(x)
        return super().forward(x)


@torch.no_grad()
def test_a_token_that_is_dropped_goes_through_no_expert() -> None:
    model = GPT(block=Dropped).double().eval()
    load = seen(model, "expert_load", IDS).profile().curve("expert_load")
    dropped = 0
    blocks: Any = model.transformer["h"]
    for layer, block in enumerate(blocks, start=1):
        for sample, chosen in enumerate(block.gate.chosen):
            counts = Counter(chosen.flatten().tolist())
            dropped += counts.pop(-1, 0)
            assert float(load[sample, layer]) == pytest.approx(max(counts.values(), default=0) / IDS.shape[1])
    assert dropped


def test_indices_beyond_the_experts_are_no_routing() -> None:
    """Nor an error of torch's inside the model."""
    with raises(WatchError, subject="routing"):
        seen(GPT(block=lambda dropout: Dropped(dropout, nowhere=3)).double().eval(), "expert_load", IDS)


def test_what_a_router_returns_is_told_from_other_tuples() -> None:
    scores, weights, chosen = torch.randn(5, 4), torch.rand(5, 2), torch.randint(4, (5, 2))
    found = routing_in((scores, weights, chosen))
    assert found is not None and all(map(torch.equal, found, (scores, weights, chosen)))
    others: list[Any] = [
        (scores, weights),
        [scores, weights, chosen],
        (scores.long(), weights, chosen),  # scores that are counts
        (scores, weights.long(), chosen),
        (scores, weights, chosen.double()),  # chosen experts that are no indices
        (scores, weights[:, :1], chosen),
        (scores[:4], weights, chosen),
        (scores, weights, chosen + 3),  # an expert of a number too high
        (scores, weights, chosen - 5),
    ]
    assert [routing_in(output) for output in others] == [None] * len(others)
    dropped = routing_in((scores, weights, torch.where(chosen == 1, -1, chosen)))
    assert dropped is not None and bool((dropped[1][chosen == 1] == 0).all()) and int(dropped[2].min()) >= 0
