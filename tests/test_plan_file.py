"""A plan file edited by hand: whatever JSON can hold in whatever place, the answer names the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar import cli
from autopar.errors import AutoparError, PlanMismatchError, SpecError
from autopar.mesh import divisors
from autopar.plan import Plan

GOOD: dict[str, Any] = {
    "schema_version": 1,
    "degrees": {"dp": 1, "cp": 1, "tp": 2, "pp": 2},
    "global_batch": 8,
    "seq_len": 16,
    "micro_batch": 2,
    "stages": [["model.layers.0-1"], ["model.layers.2-3"]],
    "parameters": {"a.weight": "S(0)"},
    "checkpoint": {"model.layers.0": "full"},
    "prediction": {
        "step_time_s": 1.0,
        "time_s": {"forward": 1.0},
        "peak_memory_bytes": [{"total": 10}, {"total": 12}],
        "collectives": [{"kind": "all_gather", "axis": "tp", "bytes": 8, "count": 2}],
    },
}
NOTHING_LIKE_IT = [None, -1, 0, 1.5, True, "x", [1], [[1]], [None], {"a": None}, {"a": [1]}, 1e400, 10**30, [["a"], 1]]
LEGAL = {  # of the above; what is only noted may be anything
    "zero": [0],
    "sequence_sharding": [True],
    "solver": [{"a": None}],
    "prediction": [{"a": None}, {"a": [1]}],
}
KEYS = sorted({*GOOD, "ops", "zero", "precision", "overlap", "fingerprints", "solver", "schedule", "virtual_stages"})


def test_the_plan_that_is_spoiled_below_is_good() -> None:
    assert Plan.loads(json.dumps(GOOD)).layer_paths()[1] == ("model.layers.2", "model.layers.3")


@pytest.mark.parametrize("key", [*KEYS, "sequence_sharding", "context_parallel"])
def test_a_value_of_another_type_is_refused_by_key(key: str) -> None:
    accepted, messages = [], []
    for value in NOTHING_LIKE_IT:
        try:
            Plan.loads(json.dumps({**GOOD, key: value}))
            accepted.append(value)
        except AutoparError as error:
            messages.append(str(error))
    assert accepted == LEGAL.get(key, [])
    assert all(key.replace("_", " ") in message.replace("_", " ") for message in messages)
    assert all("\n" not in message and len(message) < 250 for message in messages)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("degrees", "tp"), None),
        (("degrees", "tp"), 10**30),
        (("degrees", "tpp"), 2),
        (("prediction", "step_time_s"), "soon"),
        (("prediction", "step_time_s"), 0),
        (("prediction", "time_s"), [1.0]),
        (("prediction", "peak_memory_bytes"), [{"total": 10}]),
        (("prediction", "peak_memory_bytes"), [{"total": 10}, {"parameters": 3}]),
        (("prediction", "collectives"), [{"kind": "all_gather"}]),
        (("parameters", "a.weight"), "S(0,left=0)"),
        (("parameters", "a.weight"), "S(" + "9" * 5000 + ")"),
    ],
)
def test_what_is_inside_is_checked_too(place: tuple[str, str], value: Any) -> None:
    spoiled = json.loads(json.dumps(GOOD))
    spoiled[place[0]][place[1]] = value
    with pytest.raises(SpecError, match=place[0]):
        Plan.loads(json.dumps(spoiled))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_a_schedule_that_means_nothing_without_a_pipeline_is_refused(schedule: str) -> None:
    flat = {**GOOD, "degrees": {"tp": 2}, "stages": [["model.layers.0-3"]], "prediction": {}, "schedule": schedule}
    if schedule in ("gpipe", "1f1b"):  # plain accumulation
        assert Plan.loads(json.dumps(flat)).schedule == schedule
        return
    with pytest.raises(SpecError, match=f"schedule: {schedule} needs a pipeline, and pp is 1.*one of gpipe, 1f1b"):
        Plan.loads(json.dumps(flat))


@pytest.mark.parametrize("entry", ["model.layers.0-99999999", "model.layers.3-0", "model.layers.0-" + "9" * 5000, ""])
def test_a_range_that_is_no_run_of_layers_is_refused(entry: str) -> None:
    with pytest.raises(SpecError, match="stages"):
        Plan.loads(json.dumps({**GOOD, "stages": [[entry], ["model.layers.4"]]}))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "not JSON"),
        ("[]", "a plan is a JSON object"),
        ('{"schema_version": 1, "seq_len": 1, "seq_len": 2}', "'seq_len' is given twice"),
        ('{"schema_version": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_text_that_is_no_plan(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Plan.loads(text)


@pytest.mark.parametrize("version", [True, 1.0, "1", 2, None])
def test_another_schema_version_is_a_mismatch(version: Any) -> None:
    with pytest.raises(PlanMismatchError, match="schema version"):
        Plan.loads(json.dumps({**GOOD, "schema_version": version}))


def test_a_partial_prediction_is_reported_as_far_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for prediction in ({"note": 1}, {"step_time_s": 2.0}, {"peak_memory_bytes": [{"total": 1024}, {"total": 2048}]}):
        (tmp_path / "plan.json").write_text(json.dumps({**GOOD, "prediction": prediction}))
        assert cli.main(["report", str(tmp_path / "plan.json")]) == 0
        out = capsys.readouterr().out
        assert ("2 s" in out) == ("step_time_s" in prediction)
        assert ("2 KiB" in out) == ("peak_memory_bytes" in prediction)


def test_divisors() -> None:
    for number in range(1, 200):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
    assert divisors(2**31 - 1) == [1, 2**31 - 1]
