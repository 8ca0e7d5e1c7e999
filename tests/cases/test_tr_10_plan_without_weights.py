"""tr-10 (microsoft/nnscaler#43): an 8-billion-parameter model is planned in minutes, in little memory, weightless."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S, LIMIT_BYTES = 300.0, 4 * 2**30


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_llama3_8b_for_64_devices(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "autopar.cli", "plan", "--model", "llama3-8b", "--cluster", "dgx-h100:8", "--json"]
    with out.open("wb") as stdout:
        process = subprocess.Popen([*command, "--global-batch", "256", "--seq-len", "4096"], stdout=stdout)
        # wait4 gives this process's own peak of resident memory; its weights alone would be 32 GB.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    found = json.loads(out.read_text())
    assert 0 < found["capture_s"] < found["capture_s"] + found["search_s"] < LIMIT_S
    assert usage.ru_maxrss * 1024 < LIMIT_BYTES
    degrees = found["plan"]["degrees"]
    assert degrees["dp"] * degrees["cp"] * degrees["tp"] * degrees["pp"] == 64
    assert sum(found["prediction"]["time_s"].values()) == pytest.approx(found["prediction"]["step_time_s"], rel=1e-6)
