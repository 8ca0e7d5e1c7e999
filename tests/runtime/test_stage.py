"""Stages as modules: recomputation, dropout on and off, rows cut by rank and micro-batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import PlanMismatchError, SpecError
from autopar.ir import InputSpec
from autopar.mesh import Degrees
from autopar.runtime.recompute import CheckpointedBlock
from autopar.runtime.rows import count_micro_batches, cut_rows, row_count
from autopar.runtime.stage import set_training
from autopar.trace import trace
from tests import models
from tests.runtime import hand_made


class _Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(F.gelu(self.linear(x)), 0.5)


def test_a_checkpointed_block_runs_again_and_drops_the_same_elements() -> None:
    block, x = _Noisy(), torch.randn(4, 8)
    results = []
    for module in (block, CheckpointedBlock(block)):
        torch.manual_seed(1)
        block.zero_grad()
        out = module(x)
        (out**2).sum().backward()
        results.append((out.detach(), block.linear.weight.grad.clone()))
    assert block.calls == 3
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    with torch.no_grad():
        CheckpointedBlock(block)(x)
    assert block.calls == 4


def test_dropout_is_switched_off_and_on_again() -> None:
    torch.manual_seed(0)
    model = models.TinyGPT(dropout=0.3).train()
    batch = models.default_batch()
    graph = trace(model, batch).graph_module
    set_training(graph, False)
    quiet = graph(**batch)[0]
    assert torch.equal(quiet, graph(**batch)[0])
    torch.testing.assert_close(quiet, model.eval()(**batch))
    set_training(graph, True)
    assert not torch.equal(graph(**batch)[0], graph(**batch)[0])


def _inputs() -> tuple[InputSpec, ...]:
    return (
        InputSpec("ids", (8, 4), torch.long, 0, 1),
        InputSpec("time_first", (4, 8), torch.long, 1, 0),
        InputSpec("scale", (), torch.float, None, None),
    )


def test_rows_are_cut_along_each_inputs_batch_dim() -> None:
    batch = {
        "ids": torch.arange(32).view(8, 4),
        "time_first": torch.arange(32).view(4, 8),
        "scale": torch.tensor(2.0),
    }
    assert row_count(_inputs(), batch) == 8
    parts = cut_rows(_inputs(), batch, 4)
    assert [p["ids"][0, 0].item() for p in parts] == [0, 8, 16, 24]
    assert [p["time_first"][0].tolist() for p in parts] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(p["scale"] is batch["scale"] for p in parts)
    with pytest.raises(SpecError, match="ids 7, time_first 8"):
        row_count(_inputs(), {**batch, "ids": batch["ids"][:7]})


@pytest.mark.parametrize(("rows", "legal"), [(7, "4 or 8 rows"), (0, "4 rows"), (3, "4 rows")])
def test_rows_that_do_not_divide_are_refused_with_legal_ones(rows: int, legal: str) -> None:
    assert count_micro_batches(8, 2, 2) == 2
    with pytest.raises(SpecError, match=legal):
        count_micro_batches(rows, 2, 2)


def test_a_plan_that_cannot_be_executed_is_refused_by_name() -> None:
    model = hand_made.build()
    traced = hand_made.capture(model)
    with pytest.raises(SpecError, match="schedule gpipe runs one stage a rank"):
        hand_made.parallel(model, traced, Degrees(), schedule="gpipe", virtual_stages=2)
    with pytest.raises(SpecError, match="interleaved needs a pipeline, and pp is 1"):
        hand_made.parallel(model, traced, Degrees(), schedule="interleaved", virtual_stages=2)
    with pytest.raises(SpecError, match="'ep' is no mesh axis"):
        hand_made.parallel(model, traced, Degrees(), fp32_reduce=("ep",))
    with pytest.raises(SpecError, match="'ignore' is not one of keep, skip, stop"):
        hand_made.parallel(model, traced, Degrees(), non_finite="ignore")
    single = hand_made.build().float()
    with pytest.raises(PlanMismatchError, match="trains in fp64, the model's parameters are fp32"):
        hand_made.parallel(single, hand_made.capture(single), Degrees())
