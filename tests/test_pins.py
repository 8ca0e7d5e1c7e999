"""Pins: parsed in any order, refused by name, and checked against cluster and batch before a model is captured."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
from torch import nn

import autopar
from autopar.errors import SpecError
from autopar.pins import Pins
from autopar.specs import ClusterSpec

TEXTS = ["tp=2", "sp=on", "checkpoint=full", "model.layers.*.mlp.down_proj=shard(1)", "model.layers.0.mlp.down_proj=R"]


def test_pins_mean_the_same_in_any_order() -> None:
    parsed = [Pins.parse(order) for order in itertools.permutations(TEXTS)]
    assert all(p == parsed[0] and p.texts() == parsed[0].texts() for p in parsed)
    assert parsed[0].tp == 2
    assert parsed[0].sp is True
    # The exact path comes before the pattern that covers it too.
    assert list(parsed[0].modules) == ["model.layers.0.mlp.down_proj", "model.layers.*.mlp.down_proj"]


def test_pins_survive_text_and_pickle() -> None:
    pins = Pins.parse(TEXTS)
    assert Pins.parse(pins.texts()) == pins
    assert pickle.loads(pickle.dumps(pins)) == pins
    assert Pins().texts() == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tpp=2", "unknown pin 'tpp'.*did you mean 'tp'"),
        ("micro_batch=2", "unknown pin 'micro_batch'.*did you mean 'microbatch'"),
        ("tp", "not of the form name=value"),
        ("tp=", "not of the form name=value"),
        ("=2", "not of the form name=value"),
        ("tp=two", "pin tp: must be a positive integer, at most 2147483647, not 'two'"),
        ("tp=0", "pin tp: must be a positive integer"),
        ("tp=-2", "pin tp: must be a positive integer"),
        ("tp=shard(1)", "pin tp: must be a positive integer"),
        ("sp=maybe", "pin sp: must be true or false"),
        ("zero=4", "pin zero: 4 is not one of 0, 1, 2, 3"),
        ("schedule=2f2b", "pin schedule: '2f2b' is not one of gpipe, 1f1b"),
        ("checkpoint=some", "pin checkpoint: 'some' is not one of none, selective, selective-ops, full"),
        ("lm_head=sharded", "unknown pin 'lm_head'"),
        ("model.norm=shard(x)", "pin model.norm: not a placement"),
        ("model.norm=P", "a weight is replicated or sharded, not P"),
    ],
)
def test_wrong_pins(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Pins.parse([text])


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ("schedule=interleaved pp=1", "schedule interleaved needs a pipeline.*Try: pp of 2 or more, or .*gpipe, 1f1b"),
        ("schedule=zero-bubble pp=1", "schedule zero-bubble needs a pipeline"),
        ("zero=0 zero_group=2", "zero 0 shards nothing"),
        ("checkpoint=selective checkpoint_segment=2", "checkpoint selective has no segments"),
    ],
)
def test_a_pin_that_another_leaves_without_effect_is_refused(texts: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Pins.parse(texts.split())


@pytest.mark.parametrize("key", ["tp=2", "lm_head=replicate"])
def test_a_pin_given_twice_is_refused(key: str) -> None:
    with pytest.raises(SpecError, match="given twice"):
        Pins.parse([key, "pp=2", key])


def test_module_pins_without_a_dot_are_modules() -> None:
    assert Pins.parse(["lm_head=replicate"]).modules == {"lm_head": "replicate"}


@pytest.mark.parametrize(
    "values", [{"tp": True}, {"dp": 1.5}, {"sp": 1}, {"zero": True}, {"schedule": "none"}, {"modules": {"a": 1}}]
)
def test_pins_built_in_python_meet_the_same_checks(values: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="pin"):
        Pins(**values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"zero": 1.0}, "pin zero: 1.0 is not one of"),
        ({"modules": None}, "pin modules: must map module paths to placements, not None"),
        ({"modules": {3: "R"}}, "pin modules: a path: must be a name, not 3"),
        ({"modules": {"lm_head": 3}}, "pin lm_head: the placement: must be a name, not 3"),
    ],
)
def test_values_of_another_type_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Pins(**values)


@pytest.mark.parametrize("name", ["model", "cluster", "train", "pins", "search"])
def test_what_is_no_specification_is_refused_by_name(name: str) -> None:
    arguments: dict[str, Any] = {"model": nn.Linear(2, 2), "cluster": ClusterSpec.preset("local", 2), name: "tp=2"}
    with pytest.raises(SpecError, match=f"^{name}: must be of type .*, not 'tp=2'. Try: "):
        autopar.plan(**arguments)
    with pytest.raises(SpecError, match=f"^{name}: must be of type"):
        autopar.parallelize(**arguments)
