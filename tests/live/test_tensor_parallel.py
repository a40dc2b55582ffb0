"""Weights that are split over processes without saying how are refused; all others are not."""

from typing import Any

import pytest
from torch import nn

from rankscope.errors import WatchError
from rankscope.live.tensor_parallel import _refuse_plain_shards
from tests.raising import raises


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
