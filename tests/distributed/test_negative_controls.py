"""Faults put in on purpose: each trains the wrong model without an error, and each has to fail the comparison."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from autopar.mesh import Degrees
from autopar.pins import Pins
from autopar.plan import Plan
from autopar.runtime import collectives, dropout, reductions, tokens, world
from autopar.runtime.launch import run_ranks
from autopar.verify import _Comparison
from tests import models, plans
from tests.distributed.test_dropout import _compare, _single, _train

Fault = Callable[[], AbstractContextManager[Any]]


def unequal() -> tuple[nn.Module, dict[str, Any]]:
    """Replicas and micro-batches with other numbers of targets."""
    batch = models.default_batch()
    labels = batch["labels"].clone()
    labels[:4, 5:] = -100
    return models.tiny_gpt(), {**batch, "labels": labels}


def _conversion(source: str, target: str, forward: str, backward: str) -> Fault:
    wrong = {**collectives.CONVERSIONS, (source, target): (forward, backward)}
    return lambda: mock.patch.object(collectives, "CONVERSIONS", wrong)


_own_divisors = tokens.TokenCounter.divisors


def _mean_of_means(self: tokens.TokenCounter, inputs: Any) -> Any:
    """Divisors as if every replica had as many targets as this one."""
    with mock.patch.object(tokens.dist, "all_reduce", lambda count, group: count.mul_(dist.get_world_size(group))):
        return _own_divisors(self, inputs)


def _in_order(x: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    return x.chunk(ranks, dim)[rank].clone()


TP, SP = (plans.megatron("tiny_gpt", Degrees(tp=2), sequence_sharding=sp, micro_batch=4) for sp in (False, True))
DP, PP, CP = (plans.megatron("tiny_gpt", d, micro_batch=2) for d in (Degrees(dp=2), Degrees(pp=2), Degrees(cp=2)))

FAULTS: dict[str, tuple[Plan, Fault, str]] = {
    "the gradient of a column-parallel input is not summed": (TP, _conversion("R", "R|P", "none", "none"), ""),
    "each rank adds the bias of a row-parallel product": (TP, _conversion("R", "P", "none", "none"), "loss"),
    "a gathered sequence gives back its own slice": (SP, _conversion("S", "R|P", "all_gather", "slice"), ""),
    "gradients of norms are not summed under sequence sharding": (
        SP, lambda: mock.patch.object(reductions, "_partial_sums", return_value=[]), "norm"),
    "replicas do not sum their gradients": (
        DP, lambda: mock.patch.object(world.World, "data_group", return_value=None), ""),
    "a mean of the replicas' means": (
        DP, lambda: mock.patch.object(tokens.TokenCounter, "divisors", _mean_of_means), "loss"),
    "tied weights are not summed over stages": (
        PP, lambda: mock.patch.object(reductions, "_tied_sums", return_value=[]), "tokens.weight"),
    "a sequence is cut in order where attention expects front and back": (
        CP, lambda: mock.patch.object(collectives, "zigzag_part", _in_order), "loss"),
}  # fmt: skip


def _with_every_fault() -> dict[str, tuple[bool, bool, str]]:
    """Per fault: passed without it, passed with it, the tensor that is furthest off."""
    comparison = _Comparison(unequal, Pins(), "float64", 1)
    clean = {plan: comparison.run(plan).passed for plan in (TP, SP, DP, PP, CP)}
    found = {}
    for name, (plan, fault, _) in FAULTS.items():
        with fault():
            result = comparison.run(plan)
        found[name] = clean[plan], result.passed, result.worst[0]["name"]
    return found


@pytest.mark.distributed
def test_every_fault_is_reported() -> None:
    for found in run_ranks(2, _with_every_fault):
        for name, (clean, passed, furthest) in found.items():
            assert clean, name
            assert not passed, name
            assert FAULTS[name][2] in furthest, (name, furthest)


def _masks_of_their_own(reference: Any) -> tuple[list[str], list[str]]:
    plan, keep_mask = (
        plans.megatron("tiny_gpt", Degrees(tp=2), sequence_sharding=False, micro_batch=2),
        dropout.keep_mask,
    )

    def wrong(x: Any, rows: Any, p: float, key: int, cuts: Any) -> Any:
        return keep_mask(x, rows, p, key + dist.get_rank(), cuts)

    clean = _compare([plan], reference)
    with mock.patch.object(dropout, "keep_mask", wrong):
        return clean, _compare([plan], reference)


@pytest.mark.distributed
def test_a_dropout_key_that_depends_on_the_rank_is_reported() -> None:
    for clean, faulty in run_ranks(2, _masks_of_their_own, _train(_single())):
        assert clean == []
        assert len(faulty) == 1
