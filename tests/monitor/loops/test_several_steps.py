"""Several steps of the optimiser for one batch, as PPO makes them: `monitor.step` after each of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rankscope
from rankscope import Monitor
from tests.monitor.loops import tasks
from tests.monitor.training import batch, gpt2

EPOCHS, MINIBATCHES, ROLLOUTS, EVERY = 2, 2, 3, 3
STEPS = EPOCHS * MINIBATCHES * ROLLOUTS


def log_probability(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1)


def train(run: Path | None, **options: Any) -> tuple[list[float], Any, tasks.Steps]:
    """Every rollout of 6 samples gives 4 steps, each on 3 of them; a frozen copy and the old policy are called, too."""
    policy, reference = gpt2(dropout=0.1).train(), gpt2(dropout=0.0).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    steps = tasks.Steps(policy.transformer.h)
    monitor = None
    if run is not None:
        monitor = Monitor(policy, every=EVERY, run=run, optimizer=optimizer, **options)
    torch.manual_seed(5)
    losses = []
    for rollout in range(ROLLOUTS):
        ids = batch(rollout, 6)
        reward = (ids == ids[:, :1]).double().mean(-1)
        policy.eval()
        with torch.no_grad():  # generation and its probabilities
            policy(input_ids=ids[:, :4])
            old = log_probability(policy, ids)
            expected = log_probability(reference, ids)
        policy.train()
        for _ in range(EPOCHS):
            for rows in torch.randperm(6).chunk(MINIBATCHES):
                new = log_probability(policy, ids[rows])
                ratio = (new - old[rows]).exp()
                gain = (reward[rows] - reward.mean())[:, None]
                clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
                loss = -clipped.mean() + 0.1 * (new - expected[rows]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                steps.begins()
                optimizer.step()
                steps.ends()
                losses.append(loss.item())
                if monitor is not None:
                    monitor.step(loss=loss)
    if monitor is not None:
        monitor.close()
    return losses, policy, steps


@pytest.mark.sampled(1)
@pytest.mark.parametrize("inline", [False, True])
def test_every_step_counts_and_the_training_is_the_same(tmp_path: Path, inline: bool) -> None:
    options: dict[str, Any] = {"metrics": ["relative_mu", "mu", "entropy", "largest_logit"], "spectra": True}
    options |= {} if inline else {"probe": {"input_ids": batch(99, 5), "labels": batch(99, 5)}}
    bare, watched = train(None), train(tmp_path, **options)
    assert len(bare[0]) == STEPS and bare[0] == watched[0] and tasks.same(bare[1], watched[1])
    rows = rankscope.read(tmp_path).tables["training"]
    watched[2].hold(rows, EVERY)  # gradients and updates are those of each step that is measured
    mu = rows.filter(metric="mu")
    assert mu["step"].unique().sort().to_list() == list(range(EVERY if inline else 0, STEPS + 1, EVERY))
    # Of training batches only the minibatch of that step counts: no rollout, no other epoch, no frozen copy.
    assert mu["samples"].unique().to_list() == [3 if inline else 5]
    losses = rows.filter(metric="loss").sort("step")["value"].to_list()
    assert losses == pytest.approx([sum(bare[0][k : k + EVERY]) / EVERY for k in range(0, STEPS, EVERY)])


def test_a_loop_that_counts_batches_has_the_last_step_of_each(tmp_path: Path) -> None:
    """`monitor.step` once for a batch with several steps: gradients of the last, training batches of all of them."""
    model, ids = gpt2(dropout=0.0), batch(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    steps = tasks.Steps(model.transformer.h)
    with Monitor(model, "mu", every=1, run=tmp_path, optimizer=optimizer) as monitor:
        for _ in range(2):
            for _ in range(3):
                optimizer.zero_grad()
                model(input_ids=ids, labels=ids).loss.backward()
                steps.begins()
                optimizer.step()
                steps.ends()
            monitor.step()
    rows = rankscope.read(tmp_path).tables["training"]
    assert rows.filter(metric="mu")["samples"].unique().to_list() == [3 * len(ids)]
    found = rows.filter(metric="grad_mlp").sort("step", "layer")["value"].to_list()
    assert found == pytest.approx([*steps.gradients[2], *steps.gradients[5]])
