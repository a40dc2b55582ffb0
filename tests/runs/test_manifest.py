"""A manifest keeps what it knows and what it does not."""

import json

import pytest

from rankscope.runs import EarlyStop, Manifest, Network, Text


def test_known_and_unknown_fields_are_read_and_written() -> None:
    given = {
        "created": "now", "networks": [{"variant": "san", "metrics": ["mu"], "later": 1}],
        "text": {"path": "a.txt", "limit": 3}, "stopped": {"finished": ["san"], "asked": 2},
        "later": {"b": []},
    }  # fmt: skip
    manifest = Manifest.from_dict(given)
    assert manifest.networks == (Network(variant="san", metrics=("mu",), more={"later": 1}),)
    assert manifest.text == Text(path="a.txt", limit=3)
    assert manifest.stopped == EarlyStop(finished=("san",), asked=2)
    assert manifest.more == {"later": {"b": []}}
    assert Manifest.from_dict(json.loads(json.dumps(manifest.to_dict()))) == manifest
    for field, odd in (("created", 1), ("networks", {}), ("network", [1]), ("text", "a.txt"), ("samples", "3")):
        name = "networks" if field == "network" else field  # an entry is named, not the list
        with pytest.raises(ValueError, match=field):
            Manifest.from_dict({**given, name: odd})
