"""What a batch looks up in tables is held against their sizes before any rank runs, and named by its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import SpecError
from autopar.passes import prepare
from autopar.runtime.index_limits import IndexLimits
from autopar.runtime.rows import fitting
from autopar.trace import trace
from tests import models

FAMILIES = ("tiny_gpt", "gpt2", "llama", "bert", "t5", "opt")


def _check(family: str, batch: dict[str, Tensor]) -> None:
    traced = prepare(models.captured(family))
    IndexLimits(traced).check(fitting(traced, batch))


def _with(name: str, value: int) -> dict[str, Tensor]:
    batch = models.default_batch()
    batch[name][3, 5] = value
    return batch


@pytest.mark.parametrize("family", FAMILIES)
def test_indices_outside_their_tables_are_named(family: str) -> None:
    _check(family, models.default_batch())
    _check(family, _with("labels", -100))
    for value in (64, -1):
        with pytest.raises(SpecError, match=rf"input_ids holds {value}, and .*weight has 64 rows \(0 to 63\)"):
            _check(family, _with("input_ids", value))
        with pytest.raises(SpecError, match=rf"labels holds {value}, and "):
            _check(family, _with("labels", value))


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("tiny_gpt", "sequences of 80 tokens read row 79 of positions.weight, which has 64 rows.*at most 64 tokens"),
        ("gpt2", "sequences of 80 tokens read row 79 of .*wpe.weight, which has 64 rows"),
        ("opt", "sequences of 80 tokens read row 81 of .*embed_positions.weight, which has 66 rows.*at most 64 tokens"),
        ("bert", "input_ids has 80 tokens, and the captured graph holds for 1 to 64"),
    ],
)
def test_sequences_longer_than_the_position_table_are_named(family: str, says: str) -> None:
    _check(family, models.default_batch(seq=64))
    with pytest.raises(SpecError, match=says):
        _check(family, models.default_batch(seq=80))


class _Counted(nn.Module):
    """Positions count the tokens that are no padding, and begin at 2: RoBERTa's. Targets are a frozen teacher's best
    guess, if there is one."""

    def __init__(self, teacher: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.positions, self.teacher = models.tiny_gpt(), nn.Embedding(18, 64, dtype=torch.float64), teacher

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        counted = (input_ids != 1).long()
        places = torch.cumsum(counted, 1) * counted + 1
        logits = self.body(input_ids) + self.positions(places)
        target = labels if self.teacher is None else self.teacher(input_ids).argmax(-1)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def test_an_index_that_follows_from_values_is_not_said_to_be_one() -> None:
    limits, batch = IndexLimits(prepare(trace(_Counted(), models.default_batch()))), models.default_batch(seq=17)
    batch["input_ids"].clamp_(min=2)
    with pytest.raises(SpecError, match="input_ids gives index 18, and positions.weight has 18 rows.*shorter sequ"):
        limits.check(batch)
    batch["input_ids"][:, 3] = 1
    limits.check(batch)


def test_a_frozen_teacher_does_not_run_on_the_host() -> None:
    teacher = models.tiny_gpt().requires_grad_(False)
    traced = prepare(trace(_Counted(teacher), models.default_batch()))
    assert any(
        node.op == "get_attr" and str(node.target).startswith("teacher.") for node in traced.graph_module.graph.nodes
    )
    limits = IndexLimits(traced)
    assert not any("matmul" in op or "linear" in op for op in _ops_run(lambda: limits.check(models.default_batch())))


def test_inputs_that_are_indices_themselves_are_looked_at_once() -> None:
    """A copy of all labels would cost more than the rest of the check."""
    batch = _with("labels", -100)
    limits = IndexLimits(prepare(models.captured("gpt2")))
    limits.check(batch)
    ran = _ops_run(lambda: limits.check(batch))
    assert sum(op.startswith("aten::aminmax") for op in ran) == 2
    assert not {"aten::pad", "aten::clone", "aten::index", "aten::arange"} & set(ran), "sizes are those of before"
    with pytest.raises(SpecError, match="sequences of 80 tokens"):
        limits.check(models.default_batch(seq=80))


def test_what_is_cut_off_may_be_anything() -> None:
    batch = models.default_batch()
    batch["labels"][:, 0] = 4000  # GPT-2 predicts the second token first
    _check("gpt2", batch)
    batch["labels"][0, 1] = 64
    with pytest.raises(SpecError, match="labels holds 64, and the loss knows 64 classes"):
        _check("gpt2", batch)


class _Through(nn.Module):
    """Token ids by way of a table of integers, which is looked up first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.tiny_gpt()
        self.register_buffer("permuted", torch.arange(32).flip(0))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.body(self.permuted[input_ids % 40], labels)


def test_an_index_on_the_way_to_an_index_is_refused_too() -> None:
    batch = {name: x % 32 for name, x in models.default_batch().items()}
    limits = IndexLimits(prepare(trace(_Through(), batch)))
    limits.check(batch)
    batch["input_ids"][0, 0] = 39
    with pytest.raises(SpecError, match="what input_ids look up cannot be worked out: index 39 is out of bounds"):
        limits.check(batch)


def _ops_run(run: Callable[[], None]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return [event.name for event in profile.events()]


def test_the_users_batch_is_only_read() -> None:
    batch = _with("labels", -100)
    before = {name: t.clone() for name, t in batch.items()}
    _check("t5", batch)
    assert all(torch.equal(batch[name], before[name]) for name in batch)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (Tensor.float, r"input_ids holds floating-point numbers \(torch.float32\), captured with integers"),
        (lambda x: torch.complex(x.float(), x.float()), "input_ids holds complex numbers"),
        (Tensor.to_sparse, "input_ids is in the layout torch.sparse_coo. Try: a plain tensor: x.to_dense"),
        (lambda x: x.to("meta"), "input_ids is on the meta device and holds no values"),
        (lambda x: x[0], "input_ids has 1 dims, captured with 2"),
    ],
)
def test_inputs_of_another_kind_are_named(change: Callable[[Tensor], Tensor], says: str) -> None:
    batch: dict[str, Any] = models.default_batch()
    with pytest.raises(SpecError, match=says):
        fitting(models.captured("tiny_gpt"), {**batch, "input_ids": change(batch["input_ids"])})


@pytest.mark.parametrize("value", [[[1, 2]], "text", models.default_batch()["input_ids"].numpy()])
def test_what_is_no_tensor_is_named_by_its_argument(value: Any) -> None:
    with pytest.raises(SpecError, match=r"argument 'input_ids' is a .*captured as a tensor.*torch.as_tensor"):
        models.captured("tiny_gpt").signature.bind((), {**models.default_batch(), "input_ids": value})


def test_narrower_dtypes_of_a_kind_are_widened() -> None:
    traced, batch = models.captured("tiny_gpt"), models.default_batch()
    for narrow in (torch.uint8, torch.int32, torch.bool):
        ids = batch["input_ids"].to(narrow)
        assert torch.equal(fitting(traced, {**batch, "input_ids": ids})["input_ids"], ids.long())
