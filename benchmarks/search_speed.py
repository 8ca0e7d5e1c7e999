"""What a plan costs to find: capture and search in wall and CPU seconds, ILP sizes, candidates, peak memory.

    python benchmarks/search_speed.py                       # every row below, each in a process of its own
    python benchmarks/search_speed.py --row 8b-h100 --repeat 5
    python benchmarks/search_speed.py --list

Imports are excluded: they are done before the clock starts. `peak` is the resident memory of the whole process, torch
included. `figure` is the one a row is held against; the last column says whether the median reaches it. With `--repeat`
every run is a new process and the median of each column is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 900


@dataclass(frozen=True)
class Row:
    """`figure` is the most that `measure` (a key of the result, or a sum of two) may be. `layers` replaces the model's
    number of layers; `against` is a row of the same job with fewer, whose ratio is the figure."""

    name: str
    model: str
    cluster: str
    global_batch: int
    seq_len: int
    figure: float | None = None
    measure: str = "search_cpu_s"
    layers: int | None = None
    against: str = ""

    def __str__(self) -> str:
        layers = f" of {self.layers} layers" if self.layers else ""
        return f"{self.model}{layers}, {self.cluster}, {self.global_batch} x {self.seq_len}"


ROWS = {
    row.name: row
    for row in (
        Row("8b-h100", "llama3-8b", "dgx-h100:32", 1024, 8192, 5.0, "capture_s+search_s"),
        Row("175b-512", "gpt3-175b", "dgx-a100-80g:64", 512, 2048, 5.0),
        Row("175b-4096", "gpt3-175b", "dgx-a100-80g:512", 4096, 2048, 8.0),
        Row("405b-16k", "llama3-405b", "dgx-h100:2048", 2048, 131072, 15.0, "capture_s+search_s"),
        Row("1t-3072", "gpt-1t", "dgx-a100-80g:384", 3072, 2048, 10.0, "capture_s+search_s"),
        Row("24-layers", "gpt3-175b", "dgx-a100-80g:64", 512, 2048, layers=24),
        Row("96-layers", "gpt3-175b", "dgx-a100-80g:64", 512, 2048, 1.5, layers=96, against="24-layers"),
        Row("7b-box", "llama2-7b", "dgx-a100-80g:1", 512, 4096, 5.0),
        Row("tiny", "llama-tiny", "local:4", 16, 128),
        Row("gpt2-box", "gpt2", "dgx-a100-40g:1", 512, 1024),
        Row("70b-h100", "llama3-70b", "dgx-h100:32", 1024, 8192),
    )
}

COLUMNS = ("capture_s", "capture_cpu_s", "search_s", "search_cpu_s", "variables", "largest_ilp_variables", "candidates",
           "solved", "gap", "peak_gib")  # fmt: skip


def measure(row: Row) -> dict[str, Any]:
    """One search in this process."""
    from autopar import passes
    from autopar.cost_model.search import search
    from autopar.models import resolve
    from autopar.specs import ClusterSpec, TrainSpec
    from autopar.trace import trace

    source = resolve(_config_of(row))
    cluster = ClusterSpec.parse(row.cluster)
    train = TrainSpec(global_batch=row.global_batch, seq_len=row.seq_len)
    model = source.build(device="meta")
    started, started_cpu = time.perf_counter(), time.process_time()
    traced = passes.prepare(trace(model, source.example()))
    capture_s, capture_cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    started, started_cpu = time.perf_counter(), time.process_time()
    result = search(traced, cluster, train)
    spent = {"search_s": time.perf_counter() - started, "search_cpu_s": time.process_time() - started_cpu}
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    plan = result.plan
    degrees = " ".join(f"{axis}={size}" for axis, size in vars(plan.degrees).items() if size > 1)
    return {
        **result.statistics, **spent, "capture_s": capture_s, "capture_cpu_s": capture_cpu_s, "peak_gib": peak_gib,
        "plan": f"{degrees or 'one device'}, micro-batch {plan.micro_batch}, {plan.schedule}, ZeRO {plan.zero}",
        "step_time_s": plan.prediction["step_time_s"], "mfu": plan.prediction["mfu"],
    }  # fmt: skip


def _config_of(row: Row) -> str:
    """The model's name, or a config file with another number of layers."""
    if row.layers is None:
        return row.model
    from autopar.model_presets import PRESETS

    values = dict(PRESETS[row.model])
    values["n_layer" if "n_layer" in values else "num_hidden_layers"] = row.layers
    path = Path(tempfile.gettempdir(), f"autopar-search-speed-{row.model}-{row.layers}-{os.getpid()}.json")
    path.write_text(json.dumps(values))
    return f"hf:{path}"


def run(rows: list[Row], repeat: int) -> dict[str, dict[str, Any]]:
    """Medians over `repeat` processes of each row, by name; rows that are compared take turns."""
    found: dict[str, list[dict[str, Any]]] = {row.name: [] for row in rows}
    for _ in range(repeat):
        for row in rows:
            command = [sys.executable, __file__, "--row", row.name, "--raw"]
            done = subprocess.run(command, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=False)
            if done.returncode != 0:
                sys.exit(f"{row.name}: exit status {done.returncode}")
            found[row.name].append(json.loads(done.stdout))
    return {
        name: {**runs[-1], **{key: statistics.median(run[key] for run in runs) for key in COLUMNS}}
        for name, runs in found.items()
    }


def verdict(row: Row, found: dict[str, Any], others: dict[str, dict[str, Any]]) -> str:
    """The figure beside what was measured."""
    if row.figure is None:
        return ""
    value = sum(found[key] for key in row.measure.split("+"))
    if row.against:
        value /= others[row.against]["search_cpu_s"]
    return f"{value:.2f} of {row.figure:g}{'x' if row.against else ' s'} {'ok' if value <= row.figure else 'MISSED'}"


def main() -> None:
    parser = argparse.ArgumentParser(description="capture and search: time, size, memory")
    parser.add_argument("--row", action="append", choices=list(ROWS), help="a row to run; may be repeated")
    parser.add_argument("--repeat", type=int, default=1, help="processes a row; medians are printed")
    parser.add_argument("--list", action="store_true", help="print the rows")
    parser.add_argument("--raw", action="store_true", help="run the one row in this process and print JSON")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:10}  {row}" for name, row in ROWS.items()))
        return
    if options.raw:
        print(json.dumps(measure(ROWS[options.row[0]])))
        return
    chosen = options.row or list(ROWS)
    wanted = [name for name in ROWS if name in chosen or any(ROWS[c].against == name for c in chosen)]
    print(
        "  ".join([f"{'row':10}", *(f"{column.removesuffix('_s'):>{_width(column)}}" for column in COLUMNS), "figure"])
    )
    others: dict[str, dict[str, Any]] = {}
    for name in wanted:
        if name not in others:
            compared = [ROWS[other] for other in wanted if other == name or ROWS[other].against == name]
            others |= run(compared, options.repeat)
        found = others[name]
        cells = [f"{_text(column, found[column]):>{_width(column)}}" for column in COLUMNS]
        print("  ".join([f"{name:10}", *cells, verdict(ROWS[name], found, others)]), flush=True)
        print(f"{'':10}  {ROWS[name]}: {found['plan']}; {found['step_time_s']:.4g} s, MFU {found['mfu']:.1%}")


def _width(column: str) -> int:
    return max(8, len(column.removesuffix("_s")))


def _text(column: str, value: float) -> str:
    if column == "gap":
        return f"{value:.1e}" if value > 1e-9 else "0"
    return f"{value:.2f}" if column.endswith(("_s", "_gib")) else f"{value:,.0f}"


if __name__ == "__main__":
    main()
