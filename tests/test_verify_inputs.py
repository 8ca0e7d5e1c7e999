"""What verify compares on: the user's own batch, and no dropout."""

from __future__ import annotations

import torch

from autopar.verify import _without_dropout
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
