from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from autopar.errors import SpecError
from autopar.runtime.launch import RankTimeoutError, RemoteTracebackError, run_ranks


def _sum_ranks(offset: int) -> tuple[int, float, int]:
    x = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(x)
    return dist.get_rank(), x.item(), os.getpid()


def test_results_come_in_rank_order() -> None:
    results = run_ranks(3, _sum_ranks, 10, timeout_s=60)
    assert [(rank, total) for rank, total, _ in results] == [(0, 33.0), (1, 33.0), (2, 33.0)]
    assert len({pid for *_, pid in results}) == 3


def _fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise SpecError("boom", where="rank one")
    time.sleep(600)


def test_the_failing_rank_is_raised_without_waiting_for_the_others() -> None:
    with pytest.raises(SpecError, match="boom") as caught:  # waiting would be a RankTimeoutError
        run_ranks(2, _fail_on_one, timeout_s=60)
    assert isinstance(caught.value.__cause__, RemoteTracebackError)
    assert "_fail_on_one" in str(caught.value.__cause__)


def _sleep_on_zero(pid_file: str) -> None:
    if dist.get_rank() == 0:
        with open(pid_file, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)


def test_a_hanging_rank_is_ended(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pid_file = tmp_path / "pid"
    with pytest.raises(RankTimeoutError, match=r"ranks \[0"):
        run_ranks(2, _sleep_on_zero, str(pid_file), timeout_s=4)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def _die() -> None:
    os._exit(3)


def test_a_killed_rank_is_reported() -> None:
    with pytest.raises(RuntimeError, match="died without a word"):
        run_ranks(1, _die, timeout_s=30)


def _double_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def test_ranks_share_no_memory_with_the_caller() -> None:
    x = torch.ones(3)
    results = run_ranks(2, _double_in_place, x, timeout_s=60)
    assert all(torch.equal(r, torch.full((3,), 2.0)) for r in results)
    assert torch.equal(x, torch.ones(3))
