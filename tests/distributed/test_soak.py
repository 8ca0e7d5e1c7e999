"""Nothing that a step makes is kept: the short form of benchmarks/soak.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.runtime.launch import run_ranks
from benchmarks.soak import soak


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pipeline", "sharded"])
def test_memory_is_flat(layout: str, tmp_path: Path) -> None:
    for result in run_ranks(4, soak, layout, 60, str(tmp_path / "metrics.jsonl"), timeout_s=280):
        early, late = result["held"]
        assert late["tensors"] <= early["tensors"] + 4, "a leak of one tensor a step would be 54"
        assert late["resident_bytes"] < early["resident_bytes"] + 16 * 2**20
        first, last = result["losses"]
        assert last < first
