"""Every mesh of 2, 4 and 8 ranks, checkpointing off and on, against one process (fp64): loss, gradients, weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from autopar.mesh import Degrees
from autopar.verify import verify_plans
from tests import models, plans


def llama() -> tuple[nn.Module, dict[str, Any]]:
    return models.llama4kv_tiny(), models.default_batch()


def tiny_gpt() -> tuple[nn.Module, dict[str, Any]]:
    return models.tiny_gpt(), models.default_batch()


FACTORIES: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {"llama": llama, "tiny_gpt": tiny_gpt}
SIZES = (1, 2, 4)


def meshes(ranks: int) -> list[Degrees]:
    return [Degrees(dp=dp, tp=tp, pp=pp) for dp in SIZES for tp in SIZES for pp in SIZES if dp * tp * pp == ranks]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("model", FACTORIES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_mesh_trains_as_one_process(model: str, ranks: int) -> None:
    wanted = [
        plans.megatron(model, degrees, checkpoint=checkpoint, micro_batch=1 if degrees.dp == 4 else 2)
        for degrees in meshes(ranks)
        for checkpoint in (False, True)
    ]
    results = verify_plans(FACTORIES[model], wanted, timeout_s=200)
    failed = [result.text() for result in results if not result.passed]
    assert not failed, "\n\n".join(failed)
    assert len(results) == {2: 6, 4: 12, 8: 14}[ranks]
