"""ppr-05, ppr-06, ppr-08, ppr-09, ppr-12: what crosses a stage boundary, and in which order.

ppr-01, ppr-02, ppr-03 and ppr-11 (odd batches, the loss on every rank) are in test_ppr_batches.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.build import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.specs import Pins
from autopar.trace import trace
from autopar.verify import _Comparison
from tests import models

DIM = 16


def _head(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1), labels.flatten())


class _Stacked(nn.Module):
    """Embedding, four equal blocks, head; subclasses say what goes between the blocks."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, DIM)
        self.blocks = nn.ModuleList([block() for _ in range(4)])
        self.head = nn.Linear(DIM, models.VOCAB, bias=False)


class _Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return (x + F.gelu(self.linear(x))).transpose(1, 2)


class TransposedModel(_Stacked):
    def __init__(self) -> None:
        super().__init__(_Transposed)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return _head(x.transpose(1, 2), self.head.weight, labels)


class _Chunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM))

    def forward(self, x: Tensor) -> Tensor:
        return torch.chunk(F.gelu(self.linear(x)) + torch.cat([x, x], -1), 2, -1)[1]


class ChunkModel(_Stacked):
    def __init__(self) -> None:
        super().__init__(_Chunk)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return _head(x, self.head.weight, labels)


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        x = x + F.gelu(self.linear(x)) * first
        return x, x[:, :1]


class PairModel(_Stacked):
    """The two tensors at a boundary share storage."""

    def __init__(self) -> None:
        super().__init__(_Pair)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        first = x[:, :1]
        for block in self.blocks:
            x, first = block(x, first)
        return _head(x + first, self.head.weight, labels)


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))

    def forward(self, state: dict[str, Tensor], turns: Tensor) -> dict[str, Tensor]:
        x = self.linear(state["x"])
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns
        return {"x": state["x"] + torch.view_as_real(turned).flatten(-2)}


class RotaryModel(_Stacked):
    """Blocks hand on a dict and share a complex buffer, which every stage has to have."""

    turns: Tensor

    def __init__(self) -> None:
        super().__init__(_Rotary)
        angle = torch.arange(models.POSITIONS)[:, None] * 0.1 ** torch.arange(DIM // 2)[None]
        self.register_buffer("turns", torch.polar(torch.ones_like(angle).double(), angle.double()))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        state = {"x": self.embed(input_ids)}
        turns = self.turns[: input_ids.shape[1]]
        for block in self.blocks:
            state = block(state, turns)
        return _head(state["x"], self.head.weight, labels)


def _stacked(cls: type[nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = cls()
    for p in model.parameters():
        p.data = p.data.double()
    return model, models.default_batch()


def transposed() -> Any:
    return _stacked(TransposedModel)


def chunk() -> Any:
    return _stacked(ChunkModel)


def pair() -> Any:
    return _stacked(PairModel)


def rotary() -> Any:
    return _stacked(RotaryModel)


def _masked(build: Any, dtype: torch.dtype) -> Any:
    mask = (torch.arange(16) < torch.tensor([16, 3, 9, 12, 16, 5, 7, 11])[:, None]).to(dtype)
    return build(), {**models.default_batch(), "attention_mask": mask}


def gpt2_long_mask() -> Any:
    return _masked(models.gpt2_tiny, torch.int64)


def llama_bool_mask() -> Any:
    return _masked(models.llama_tiny, torch.bool)


def _plan(stem: str, schedule: str = "1f1b", virtual: int = 1, micro_batch: int = 2) -> Plan:
    each = 2 // virtual
    stages = tuple((f"{stem}.{i}-{i + each - 1}",) for i in range(0, 4, each))
    return Plan(
        degrees=Degrees(pp=2), global_batch=8, seq_len=16, micro_batch=micro_batch, stages=stages,
        schedule=schedule, virtual_stages=virtual, precision="fp64",
    )  # fmt: skip


_BOUNDARIES = {
    transposed: "blocks",
    chunk: "blocks",
    pair: "blocks",
    rotary: "blocks",
    gpt2_long_mask: "transformer.h",
    llama_bool_mask: "model.layers",
}


def _boundaries() -> list[str]:
    failed = []
    for factory, stem in _BOUNDARIES.items():
        plans = [_plan(stem)]
        if stem == "blocks":
            plans += [_plan(stem, "interleaved", 2), _plan(stem).replace(overlap=("pp_send",))]
        results = list(map(_Comparison(factory, Pins(), "float64", 1).run, plans))
        failed += [f"{factory.__name__}\n{r.text()}" for r in results if not r.passed]
    return failed


@pytest.mark.distributed
def test_ppr_05_06_08_12_views_tuples_masks_and_complex_buffers_at_a_boundary() -> None:
    for failed in run_ranks(2, _boundaries, timeout_s=250):
        assert not failed, "\n\n".join(failed)


_LOCAL = ("UNSHARD", "RESHARD", "REDUCE_GRAD")  # no messages between stages


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_ppr_09_every_send_meets_its_receive(schedule: str) -> None:
    """Runs the orders of all ranks, sends blocking until received: torch's own simulator raises when nothing moves."""
    from torch.distributed.pipelining.schedules import _simulate_comms_compute

    from autopar.errors import SpecError
    from autopar.runtime.pipeline import _LOOPED, check_micro_batches

    checked = 0
    for ranks in range(2, 9):
        for micro_batches in range(1, 17):
            try:
                check_micro_batches(schedule, ranks, micro_batches)
            except SpecError:
                continue
            stages = [_Stub(index, 2 * ranks, ranks) for index in (0, ranks)]
            orders = _LOOPED[schedule](stages, micro_batches, loss_fn=lambda *_: None).pipeline_order_with_comms
            orders = {r: [a for a in order if a.computation_type.value not in _LOCAL] for r, order in orders.items()}
            _simulate_comms_compute(orders, lambda stage, ranks=ranks: stage % ranks, 2 * ranks)
            checked += 1
    assert checked > 70


class _Stub:
    """What a schedule asks of a stage before it runs."""

    def __init__(self, index: int, count: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, count, ranks, 0
        self.is_first, self.is_last = index == 0, index == count - 1
        self.has_backward, self.submod, self.device = True, nn.Identity(), torch.device("cpu")
        self.stage_index_to_group_rank = {i: i % ranks for i in range(count)}


class _Thin(nn.Module):
    """Little to compute on an activation of 8 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(1024, 2), nn.Linear(2, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x))


class WideModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 1024)
        self.blocks = nn.ModuleList([_Thin() for _ in range(4)])
        self.head = nn.Linear(1024, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x[:, :4]).flatten(0, 1), labels[:, :4].flatten())


def _fifty_steps() -> list[float]:
    """Two ranks of two chunks, 8 MB a message: no send completes before it is received."""
    torch.manual_seed(0)
    model, losses = WideModel(), []
    batch = {"input_ids": torch.arange(2048).remainder(16).expand(8, 2048).contiguous()}
    batch["labels"] = batch["input_ids"].clone()
    traced = prepare(trace(model, {name: t[:2] for name, t in batch.items()}))
    plan = _plan("blocks", "interleaved", 2, micro_batch=1).replace(seq_len=2048, precision="fp32")
    pm = build(model, traced, plan)
    optimizer = pm.optimizer(torch.optim.SGD, lr=1e-4)
    for step in range(50):
        micro_batches = {7: 4, 23: 8}.get(step, 2)
        losses.append(pm.step({name: t[:micro_batches] for name, t in batch.items()}).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.distributed
def test_ppr_09_fifty_steps_of_large_messages() -> None:
    one, other = run_ranks(2, _fifty_steps, timeout_s=280)
    assert one == other
    assert one[-1] < one[0]
