"""Predicted against measured step times of the demo model on this machine, calibrated with as many ranks as run.

    python benchmarks/calibrated_layouts.py           # 8 layouts on 2 and 4 processes
    python benchmarks/calibrated_layouts.py --json

Every layout is planned by the search under pins, on a cluster file that `autopar calibrate` has just measured. The
steps of all layouts of one number of processes are taken in turn and medians are compared, so that a busy machine slows
all of them alike. Pairs whose measured times are more than 25 % apart have to be in the predicted order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.api import find_plan
from autopar.build import build
from autopar.calibrate import calibrate_locally, show_progress
from autopar.models import example_from_config
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace

GLOBAL_BATCH, SEQ_LEN, STEPS, APART = 16, 128, 15, 1.25
LAYOUTS = {
    2: ("dp=2", "tp=2", "pp=2"),
    4: ("dp=4", "tp=4", "dp=2 tp=2", "dp=2 pp=2", "tp=2 pp=2"),
}


@dataclass(frozen=True)
class Row:
    """Seconds of a step."""

    ranks: int
    layout: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def config() -> LlamaConfig:
    """The demo's model."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SEQ_LEN,
    )


def plan_layout(cluster: ClusterSpec, layout: str) -> Plan:
    """The searched plan whose degrees are those of `layout`, the ones it does not name being 1."""
    degrees = {"dp": 1, "tp": 1, "pp": 1} | {k: int(v) for k, v in (pin.split("=") for pin in layout.split())}
    with torch.device("meta"):
        model = LlamaForCausalLM(config()).train()
    train = TrainSpec(global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN, precision="fp32")
    pins = Pins(**degrees, checkpoint="none")
    return find_plan(model, cluster, train, example=example_from_config(config()), pins=pins).plan


def step_times(plans: Sequence[Plan]) -> list[float]:
    """On every rank: the median step of each plan, of the slowest rank. Steps of the plans are taken in turn."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config()).train()
    batch = example_from_config(config(), GLOBAL_BATCH, SEQ_LEN)
    traced = prepare(trace(model, batch))
    modules = [build(model, traced, plan) for plan in plans]
    optimizers = [pm.optimizer(torch.optim.AdamW, lr=1e-4) for pm in modules]
    times: list[list[float]] = [[] for _ in plans]
    for step in range(STEPS + 2):
        for taken, pm, optimizer in zip(times, modules, optimizers, strict=True):
            dist.barrier()
            start = time.perf_counter()
            pm.step(batch)
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if step >= 2:
                taken.append(time.perf_counter() - start)
    medians = torch.tensor([statistics.median(t) for t in times], dtype=torch.float64)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return [float(m) for m in medians]


def measured(ranks: int, layouts: Sequence[str]) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(calibrate_locally(ranks, show_progress).toml(), encoding="utf-8")
        cluster = ClusterSpec.load(path)
    plans = [plan_layout(cluster, layout) for layout in layouts]
    times: list[float] = run_ranks(ranks, step_times, plans, timeout_s=600)[0]
    return [
        Row(ranks, layout, plan.prediction["step_time_s"], seconds)
        for layout, plan, seconds in zip(layouts, plans, times, strict=True)
    ]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    pairs = [
        (a, b)
        for a, b in itertools.combinations(rows, 2)
        if max(a.measured_s, b.measured_s) > APART * min(a.measured_s, b.measured_s)
    ]
    ordered = sum((a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s) for a, b in pairs)
    errors = [abs(row.error) for row in rows]
    return {
        "rows": [asdict(row) | {"error": row.error} for row in rows],
        "mean_abs_error": statistics.mean(errors),
        "largest_abs_error": max(errors),
        "pairs_apart": len(pairs),
        "pairs_ordered": ordered,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = summary([row for ranks, layouts in LAYOUTS.items() for row in measured(ranks, layouts)])
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"{'ranks':>5}  {'layout':12}{'predicted':>12}{'measured':>12}{'error':>9}")
    for row in found["rows"]:
        times = f"{1e3 * row['predicted_s']:>9.1f} ms{1e3 * row['measured_s']:>9.1f} ms"
        print(f"{row['ranks']:>5}  {row['layout']:12}{times}{100 * row['error']:>+8.1f} %")
    print(f"mean error {100 * found['mean_abs_error']:.1f} %, largest {100 * found['largest_abs_error']:.1f} %")
    print(f"{found['pairs_ordered']} of {found['pairs_apart']} pairs more than 25 % apart in the predicted order")
    return 0


if __name__ == "__main__":
    sys.exit(main())
