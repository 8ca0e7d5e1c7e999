"""Process groups of a plan."""

from __future__ import annotations

import os

import pytest
import torch

from autopar.mesh import Degrees
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.world import World


def _threads_of_worlds() -> list[int]:
    seen = []
    for _ in range(3):
        for degrees, group in ((Degrees(dp=2, tp=2), 0), (Degrees(dp=4), 2)):
            plan = Plan(degrees=degrees, global_batch=8, seq_len=8, micro_batch=1, stages=(("layer",),))
            world = World(plan, torch.device("cpu"))
            assert world.sum(torch.ones(1), "dp") == degrees.dp
            if group:
                assert world.shard_mesh(group).size() == 4
        seen.append(len(os.listdir("/proc/self/task")))
    return seen


@pytest.mark.distributed
def test_building_again_makes_no_process_groups() -> None:
    """A group of gloo has threads that poll: a process that verifies a hundred plans would do nothing else."""
    for first, *later in run_ranks(4, _threads_of_worlds, timeout_s=60):
        assert later == [first, first]
