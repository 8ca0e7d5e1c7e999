"""Recomputation changes nothing: same dropout masks (ac-01), shapes and collectives (ac-02), frozen parts (ac-06)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.build import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.recompute import CheckpointedBlock
from autopar.trace import trace
from autopar.verify import verify_plans
from tests import models, plans

MODES = ({"*": "selective"}, {"*": "selective-ops"}, {"*": "full"}, {"0-1": "full", "2": "selective-ops"})


def llama() -> tuple[nn.Module, dict[str, Any]]:
    return models.llama4kv_tiny(), models.default_batch()


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    return models.gpt2_tiny(), models.default_batch()


def partly_frozen() -> tuple[nn.Module, dict[str, Any]]:
    """Blocks 0 and 1 frozen below a trained embedding: gradients flow through them, but not to their parameters."""
    model = models.tiny_gpt()
    model.blocks[:2].requires_grad_(False)
    return model, models.default_batch()


def _in_modes(path: str, plan: Plan, modes: Sequence[Mapping[str, str]] = MODES) -> list[Plan]:
    return [
        plan.replace(checkpoint={f"{path}.{layers}": how for layers, how in mode.items()}, checkpoint_segment=3)
        for mode in modes
    ]


@pytest.mark.distributed
@pytest.mark.slow
def test_ac_02_every_mode_under_every_axis() -> None:
    layouts = [
        plans.megatron("llama", Degrees(tp=2), sequence_sharding=True, micro_batch=4),
        plans.megatron("llama", Degrees(tp=2), sequence_sharding=False, micro_batch=4),
        plans.megatron("llama", Degrees(pp=2), micro_batch=2),
        *(plans.megatron("llama", Degrees(cp=2), micro_batch=4).replace(context_parallel=kind)
          for kind in ("ring", "all-gather", "all-to-all")),
        plans.megatron("llama", Degrees(dp=2), micro_batch=2).replace(zero=3),
        plans.megatron("llama", Degrees(dp=2), micro_batch=2).replace(zero=1),
    ]  # fmt: skip
    wanted = [p for plan in layouts for p in _in_modes("model.layers", plan)]
    failed = [r.text() for r in verify_plans(llama, wanted, timeout_s=200) if not r.passed]
    assert not failed, "\n\n".join(failed)


@pytest.mark.distributed
@pytest.mark.slow
def test_ac_02_biases_and_schedules() -> None:
    layouts = [
        plans.megatron("gpt2", Degrees(tp=2), sequence_sharding=True, micro_batch=4),
        plans.megatron("gpt2", Degrees(pp=2), micro_batch=2, schedule="zero-bubble"),
        plans.megatron("gpt2", Degrees(pp=2), micro_batch=2, schedule="interleaved", virtual_stages=2),
    ]
    wanted = [p for plan in layouts for p in _in_modes("transformer.h", plan)]
    failed = [r.text() for r in verify_plans(gpt2, wanted, timeout_s=200) if not r.passed]
    assert not failed, "\n\n".join(failed)


def _dropping_gradients(sequence_sharding: bool) -> list[str]:
    """Modes whose gradients, on two tp ranks and with dropout everywhere, are not those of "none" to the bit."""
    torch.manual_seed(0)
    model, batch = models.TinyGPT(dropout=0.3).double().train(), models.default_batch()
    traced = prepare(trace(model, batch))
    plain, wrong = None, []
    for mode in ({}, *MODES):
        plan = plans.megatron("tiny_gpt", Degrees(tp=2), sequence_sharding=sequence_sharding, micro_batch=4)
        pm = build(model, traced, *_in_modes("blocks", plan, [mode]))
        pm.step(batch)
        gradients = pm.full_gradients()
        plain = plain or gradients
        if not all(torch.equal(_present(g), _present(gradients[n])) for n, g in plain.items()):
            wrong.append(f"sequence sharding {sequence_sharding}, {mode}")
    return wrong


def _present(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


@pytest.mark.distributed
@pytest.mark.parametrize("sequence_sharding", [False, True])
def test_ac_01_gradients_are_the_same_to_the_bit(sequence_sharding: bool) -> None:
    assert run_ranks(2, _dropping_gradients, sequence_sharding) == [[], []]


@pytest.mark.distributed
def test_ac_06_frozen_blocks() -> None:
    layouts = [
        plans.megatron("tiny_gpt", Degrees(pp=2), micro_batch=2),
        plans.megatron("tiny_gpt", Degrees(dp=2), micro_batch=2),
        plans.megatron("tiny_gpt", Degrees(tp=2), micro_batch=4),
    ]
    wanted = [p for plan in layouts for p in _in_modes("blocks", plan)]
    failed = [r.text() for r in verify_plans(partly_frozen, wanted, timeout_s=200) if not r.passed]
    assert not failed, "\n\n".join(failed)


@pytest.mark.parametrize("mode", ["full", "selective-ops", "selective"])
def test_ac_06_what_no_gradient_reaches_does_not_run_again(mode: str) -> None:
    model, batch = models.TinyGPT().double().train(), models.default_batch()
    for part in (model.tokens, model.positions, *model.blocks[:2]):
        part.requires_grad_(False)
    plan = plans.megatron("tiny_gpt", Degrees(), micro_batch=8).replace(checkpoint={"blocks.*": mode})
    pm = build(model, prepare(trace(model, batch)), plan)
    runs = []
    blocks = [m for graph in pm._graphs for m in graph.modules() if isinstance(m, CheckpointedBlock)]
    for index, block in enumerate(blocks):
        block.block.register_forward_pre_hook(lambda *_, i=index: runs.append(i))
    pm.step(batch)
    count = len(blocks)  # selective finds nothing to wrap in the frozen ones
    assert runs == [*range(count), count - 1, count - 2]
    gradients, trained = pm.full_gradients(), {n for n, p in model.named_parameters() if p.requires_grad}
    assert {name for name, gradient in gradients.items() if gradient is not None} == trained
