"""What a batch looks up in tables is held against their sizes before any rank runs, and named by its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.errors import SpecError
from autopar.passes import prepare
from autopar.runtime.index_limits import IndexLimits
from autopar.runtime.rows import fitting
from tests import models

FAMILIES = ("tiny_gpt", "gpt2", "llama", "bert", "t5")


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
        ("bert", "input_ids has 80 tokens, and the captured graph holds for 1 to 64"),
    ],
)
def test_sequences_longer_than_the_position_table_are_named(family: str, says: str) -> None:
    _check(family, models.default_batch(seq=64))
    with pytest.raises(SpecError, match=says):
        _check(family, models.default_batch(seq=80))


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
        (Tensor.to_sparse, "input_ids has no values of its own, or not in rows"),
        (lambda x: x.to("meta"), "input_ids has no values of its own"),
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
