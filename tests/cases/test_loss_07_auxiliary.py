"""Neighbour of loss-07: the load-balancing loss of a mixture of experts, which multiplies means over the batch, trains
where the batch runs in one piece and is refused where it is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import UnsupportedModelError
from autopar.mesh import Degrees
from autopar.passes import apply, prepare
from autopar.specs import Pins
from autopar.trace import trace
from autopar.verify import verify_plans
from autopar.verify.layout import FixedLayouts
from tests import models


def balanced() -> tuple[nn.Module, dict[str, Tensor]]:
    model = models.mixtral_tiny(dtype=torch.float32)
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.5  # type: ignore[union-attr]
    model.router_aux_loss_coef = 0.5  # type: ignore[assignment]
    return model, models.default_batch()


@pytest.mark.distributed
def test_whole_batches_train_as_in_one_process() -> None:
    traced = prepare(trace(*balanced()))
    layouts = FixedLayouts(traced, 8, 16)
    pins = {Degrees(tp=2): Pins(microbatch=8, sp=True), Degrees(pp=2): Pins(microbatch=8)}
    results = verify_plans(balanced, [layouts.plan(*mix) for mix in pins.items()], dtype="float32")
    failed = [r.text() for r in results if not r.passed]
    assert not failed, "\n\n".join(failed)
    for degrees in (Degrees(dp=2), Degrees(cp=2)):
        with pytest.raises(UnsupportedModelError, match="the batch cannot be cut"):
            apply(traced, layouts.plan(degrees, Pins()))
