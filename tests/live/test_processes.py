"""Where torch calls a stage of a pipeline to try it, and which weights that are split over processes are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from rankscope.errors import WatchError
from rankscope.live.processes import TRIAL, _refuse_plain_shards, in_trial_of_stage
from tests.raising import raises


class Asking(nn.Linear):
    """Notes at each call whether it is a trial."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.trials = list[bool]()

    def forward(self, input: Tensor) -> Tensor:
        self.trials.append(in_trial_of_stage())
        return super().forward(input)


def test_a_stage_is_tried_once_and_its_microbatches_are_no_trials(tmp_path: Path) -> None:
    model, x = Asking(), torch.randn(4, 3)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        stage = PipelineStage(model, 0, 1, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            schedule.step(x, target=x)
    finally:
        dist.destroy_process_group()
    model(x)
    # Of the first call torch makes the tokens up, by a function that earlier versions do not have.
    assert model.trials[-5:] == [False] * 5 and all(model.trials[:-5]) == hasattr(PipelineStage, TRIAL)


def test_a_function_of_the_same_name_elsewhere_is_no_trial() -> None:
    def _forward_metadata_inference() -> bool:
        return in_trial_of_stage()

    assert _forward_metadata_inference.__name__ == TRIAL and not _forward_metadata_inference()


@pytest.mark.parametrize(("size", "refused"), [(None, False), (1, False), (2, True), ("two", False)])
def test_plain_shards_of_more_than_one_process_are_refused(size: Any, refused: bool) -> None:
    """As transformers marks them, on the model or on a part of it."""
    for marked in (False, True):
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        (model[1] if marked else model)._tp_size = size
        if refused:
            with raises(WatchError, "model"):
                _refuse_plain_shards(model)
        else:
            _refuse_plain_shards(model)
    _refuse_plain_shards(nn.Linear(2, 2))
