"""ck-05 and neighbours: what is loaded is looked at before anything changes, and all ranks load the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.build import build
from autopar.errors import AutoparError
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.runtime.launch import run_ranks
from autopar.trace import trace
from tests import models, plans

pytestmark = pytest.mark.distributed

KEY = "blocks.3.mlp.2.weight"

State = dict[str, Any]


def _on_one_rank(change: Callable[[State], State], rank: int = 1) -> Callable[[State], State]:
    return lambda state: change(state) if dist.get_rank() == rank else state


def _without(state: State) -> State:
    return {key: value for key, value in state.items() if key != KEY}


BAD: dict[str, Callable[[State], Any]] = {
    f"missing .'{KEY}'.": _without,
    f"missing .'{KEY}'., unknown none": _on_one_rank(_without),
    "ranks 0 and 1 load different values": _on_one_rank(lambda s: {**s, KEY: s[KEY] + 1e-9}),
    "a NoneType, no mapping": lambda s: None,
    "a ndarray.*whole plain tensors": lambda s: {**s, KEY: s[KEY].numpy()},
    "a meta tensor": _on_one_rank(lambda s: {**s, KEY: s[KEY].to("meta")}, 0),
    "shape .3, 3., expected": lambda s: {**s, KEY: torch.ones(3, 3)},
}


def _loaded() -> None:
    model, batch = models.tiny_gpt(), models.default_batch()
    traced = prepare(trace(model, batch))
    other: State = {key: value * 2 for key, value in model.state_dict().items()}
    for degrees, zero in ((Degrees(dp=2), 0), (Degrees(dp=2), 3), (Degrees(tp=2), 0), (Degrees(pp=2), 0)):
        pm = build(copy.deepcopy(model), traced, plans.megatron("tiny_gpt", degrees, micro_batch=2).replace(zero=zero))
        for says, change in BAD.items():
            with pytest.raises(AutoparError, match=says):
                pm.load_state_dict(change(other))
        if zero:
            with pytest.raises(AutoparError, match="a DTensor.*whole plain tensors"):
                pm.load_state_dict(dict(pm.named_parameters()))
        _same(pm.state_dict(), model.state_dict())  # nothing has changed
        partial = pm.load_state_dict(_without(other), strict=False)
        assert partial.missing_keys == [KEY]
        _same(pm.state_dict(), {**other, KEY: model.state_dict()[KEY]})
        pm.load_state_dict({key: value.bfloat16() for key, value in other.items()})
        _same(pm.state_dict(), {key: value.bfloat16().double() for key, value in other.items()})
        assert pm.to("cpu").double() is pm
        for moves in (pm.half, pm.bfloat16):
            with pytest.raises(AutoparError, match="cannot be moved or cast"):
                moves()
        for copies in (copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel):
            with pytest.raises(AutoparError, match=r"neither copied nor pickled.*pm.state_dict\(\)"):
                copies(pm)


def _same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(got[key], value), key


def test_ck_05_neighbours_all_ranks_load_the_same_or_nothing() -> None:
    run_ranks(2, _loaded, timeout_s=100)
