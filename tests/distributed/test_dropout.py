"""Dropout under every plan drops what one process drops; attention drops independently on different heads and rows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.build import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.placement import Shard
from autopar.plan import Plan
from autopar.runtime.dropout import attention_with_dropout, keep_mask, seeded_dropout
from autopar.runtime.launch import run_ranks
from autopar.runtime.sharding import local_slice
from autopar.trace import trace
from tests import plans
from tests.models import TinyGPT, default_batch

Result = tuple[list[float], dict[str, Tensor]]


def _model(attention: float = 0.0) -> TinyGPT:
    torch.manual_seed(0)
    model = TinyGPT(dropout=0.3).double().train()
    for block in model.blocks:
        block.attention.dropout = attention
    return model


def _train(plan: Plan, attention: float = 0.0, seed: int = 0) -> Result:
    """Losses of two steps (other rows, other masks) and the gradients of the second."""
    model, batch = _model(attention), default_batch()
    pm = build(model, prepare(trace(model, batch)), plan, seed=seed)
    losses = []
    for _ in range(2):
        for parameter in pm.parameters():
            parameter.grad = None
        losses.append(pm.step(batch).item())
    return losses, {n: g for n, g in pm.full_gradients().items() if g is not None}


def _single(mode: str = "none", segment: int = 1) -> Plan:
    plan = plans.megatron("tiny_gpt", Degrees(), micro_batch=4)
    return plan.replace(checkpoint={"blocks.*": mode}, checkpoint_segment=segment)


def _compare(wanted: list[Plan], reference: Result) -> list[str]:
    wrong = []
    for plan in wanted:
        losses, gradients = _train(plan)
        worst = max((gradients[n] - g).abs().max().item() for n, g in reference[1].items())
        off = max(abs(a - b) for a, b in zip(losses, reference[0], strict=True))
        if worst > 1e-10 or off > 1e-10:
            wrong.append(f"{plan.degrees} sp {plan.sequence_sharding}: gradients {worst:.1e}, loss {off:.1e}")
    return wrong


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4])
def test_masks_do_not_depend_on_the_plan(ranks: int) -> None:
    degrees = {
        2: [Degrees(dp=2), Degrees(tp=2), Degrees(pp=2), Degrees(cp=2)],
        4: [Degrees(dp=2, tp=2), Degrees(cp=2, tp=2), Degrees(tp=2, pp=2)],
    }[ranks]
    layouts = [(d, sp) for d in degrees for sp in ((False, True) if d.tp > 1 else (False,))]
    wanted = [
        plans.megatron("tiny_gpt", d, sequence_sharding=sp, micro_batch=2).replace(checkpoint={"blocks.*": mode})
        for (d, sp), mode in zip(layouts, itertools.cycle(("selective-ops", "selective", "full")), strict=False)
    ]
    if ranks == 4:  # a mask cut over two axes, drawn again in recomputation
        mixed = [
            plans.megatron("tiny_gpt", Degrees(cp=2, tp=2), sequence_sharding=sp, micro_batch=2) for sp in (False, True)
        ]
        wanted += [plan.replace(checkpoint={"blocks.*": mode}) for plan in mixed for mode in ("full", "selective")]
    assert run_ranks(ranks, _compare, wanted, _train(_single())) == [[]] * ranks


def test_ac_01_checkpointing_changes_no_bit_of_a_gradient() -> None:
    plain = _train(_single(), attention=0.3)
    for mode, segment in (("full", 1), ("full", 3), ("selective", 1), ("selective-ops", 1)):
        recomputed = _train(_single(mode, segment), attention=0.3)
        assert plain[0] == recomputed[0]
        assert all(torch.equal(g, recomputed[1][n]) for n, g in plain[1].items())
    assert plain[0][0] != plain[0][1]  # other rows, other masks
    assert _train(_single(), attention=0.3, seed=1)[0] != plain[0]


def test_eval_drops_nothing_and_train_drops_again() -> None:
    model, batch = _model(), default_batch()
    pm = build(model, prepare(trace(model, batch)), _single())
    with torch.no_grad():
        reference = model.eval()(**batch)
    assert torch.equal(pm.eval()(**batch), reference)
    assert pm.train()(**batch) != reference


def test_about_p_are_dropped_and_positions_are_independent() -> None:
    x = torch.ones(64, 32, 48)
    keep = keep_mask(x, torch.arange(64), 0.5, 7, ()).float()
    assert abs(keep.mean().item() - 0.5) < 0.02
    for dim in range(3):  # no two neighbours agree more often than by chance
        same = (keep.narrow(dim, 0, x.shape[dim] - 1) == keep.narrow(dim, 1, x.shape[dim] - 1)).float().mean()
        assert abs(same.item() - 0.5) < 0.02
    other = keep_mask(x, torch.arange(64), 0.5, 8, ()).float()
    assert abs((keep == other).float().mean().item() - 0.5) < 0.02
    assert seeded_dropout(x, torch.arange(64), 0.5, training=True, key=7).max() == 2.0


def _masks() -> dict[str, Any]:
    """rng-01 on 2 tp ranks: the replicated hidden mask, this rank's part of a sharded one, its attention."""
    name = dist.group.WORLD.group_name
    rows = torch.arange(4)
    x = torch.ones(4, 8, 16, dtype=torch.float64)
    whole = keep_mask(x, rows, 0.5, 3, ())
    part = keep_mask(x[..., :8], rows, 0.5, 3, [(name, "S(2)", False)])
    q = torch.ones(4, 2, 8, 4)
    heads = attention_with_dropout(
        q, q, q, rows, p=0.5, is_causal=False, training=True, key=1, cuts=[(name, "S(1)", False)]
    )
    mine = local_slice(whole, Shard(2), dist.get_rank(), 2)
    return {"whole": whole, "matches": torch.equal(part, mine), "heads": heads}


@pytest.mark.distributed
def test_rng_01_copies_agree_and_heads_differ() -> None:
    first, second = run_ranks(2, _masks)
    assert torch.equal(first["whole"], second["whole"])
    assert first["matches"]
    assert second["matches"]
    assert not torch.equal(first["heads"], second["heads"])
    rows = first["whole"].flatten(1)
    assert not torch.equal(rows[0], rows[1])
