"""What verify compares on: the user's own batch, and no dropout."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import SpecError
from autopar.specs import Pins
from autopar.verify import _materialize, _without_dropout
from autopar.verify.record import _loss_of
from tests.models import TinyGPT, default_batch


def test_dropout_is_switched_off_and_said() -> None:
    model = TinyGPT(dropout=0.3, layers=1).double().train()
    traced, notices = _without_dropout(model, default_batch())
    assert "dropout is random" in notices[0]
    assert not model.training
    assert torch.equal(model(**default_batch()), model(**default_batch()))
    assert traced.loss is not None


def test_a_model_without_dropout_is_left_in_training() -> None:
    model = TinyGPT(layers=1).double().train()
    assert _without_dropout(model, default_batch())[1] == ()
    assert model.training


def test_a_micro_batch_no_machine_holds_is_refused_before_it_is_made() -> None:
    with pytest.raises(SpecError, match="needs a batch of 100000000 sequences, verify makes at most 4096"):
        _materialize("llama-tiny", torch.float64, Pins(microbatch=100_000_000))


def test_the_loss_of_a_tuple_is_the_scalar_that_learns() -> None:
    learns = torch.ones(3, requires_grad=True)
    assert _loss_of((learns, learns.sum(), torch.tensor(2.0))).item() == 3
    assert _loss_of({"loss": learns.mean(), "other": learns.sum()}).item() == 1
    with pytest.raises(SpecError, match="no loss to compare"):
        _loss_of((learns.sum(), [learns.mean()]))
