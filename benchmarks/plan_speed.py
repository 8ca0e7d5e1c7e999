"""What a plan costs to find: capture and search time, ILP size and peak memory, each job in a process of its own.

    python benchmarks/plan_speed.py                   # the jobs below
    python benchmarks/plan_speed.py llama3-8b         # those of one model

Capture and search exclude imports; `wall` is the whole process, imports and the building of the meta model included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 900


@dataclass(frozen=True)
class Job:
    model: str
    cluster: str
    global_batch: int
    seq_len: int

    def __str__(self) -> str:
        return f"{self.model} on {self.cluster}, {self.global_batch} x {self.seq_len}"

    def command(self) -> list[str]:
        options = ["--model", self.model, "--cluster", self.cluster, "--json"]
        sizes = ["--global-batch", str(self.global_batch), "--seq-len", str(self.seq_len)]
        return [sys.executable, "-m", "autopar.cli", "plan", *options, *sizes]


JOBS = (
    Job("llama-tiny", "local:4", 16, 128),
    Job("gpt2", "dgx-a100-40g:1", 512, 1024),
    Job("llama3-8b", "dgx-h100:32", 1024, 8192),
    Job("llama3-70b", "dgx-h100:32", 1024, 8192),
)


def run(job: Job) -> tuple[dict[str, Any], float, float]:
    """The command's JSON, its wall time in seconds and its peak resident memory in bytes."""
    with tempfile.TemporaryFile() as out:
        start = time.perf_counter()
        process = subprocess.Popen(job.command(), stdout=out)
        killer = threading.Timer(TIMEOUT_S, process.kill)
        killer.start()
        # wait4 gives the peak of this one process; getrusage would give the largest of all jobs so far.
        _, status, usage = os.wait4(process.pid, 0)
        killer.cancel()
        wall_s = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            sys.exit(f"{job}: exit status {process.returncode}")
        out.seek(0)
        return json.loads(out.read()), wall_s, usage.ru_maxrss * 1024


def main() -> None:
    jobs = [job for job in JOBS if len(sys.argv) == 1 or job.model in sys.argv[1:]]
    if not jobs:
        sys.exit(f"no such model here; one of {', '.join(sorted({job.model for job in JOBS}))}")
    columns = ("job", "capture s", "search s", "wall s", "variables", "constraints", "candidates", "pruned", "peak GiB")
    print("  ".join([f"{columns[0]:44}", *(f"{column:>11}" for column in columns[1:])]))
    for job in jobs:
        found, wall_s, peak_bytes = run(job)
        times = (f"{found['capture_s']:.1f}", f"{found['search_s']:.1f}", f"{wall_s:.1f}")
        counts = (f"{found[key]:,}" for key in ("variables", "constraints", "candidates", "pruned"))
        cells = (*times, *counts, f"{peak_bytes / 2**30:.2f}")
        print("  ".join([f"{job!s:44}", *(f"{cell:>11}" for cell in cells)]), flush=True)


if __name__ == "__main__":
    main()
