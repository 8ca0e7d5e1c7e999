"""Step time of rewritten graphs: on one process against the eager model, at tp=2 against torch's parallelize_module.

    python benchmarks/rewrite_overhead.py [--rounds 15] [--json]

One process: the demo's model and batch, forward and backward, no optimizer. tp=2: see tensor_parallel.py. What is
compared is measured in turns within one run, so that whatever else the machine does falls on both; the figures are
ratios of medians, with targets of 1.02 on one process, 0.85 at tp=2 and 0.95 with sequence sharding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensor_parallel import compare

import autopar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from train_llama import GLOBAL_BATCH, SEQ_LEN, batches, build_model

WARM_UP_ROUNDS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    table = {"one process": against_eager(options.rounds), **compare(options.rounds)}
    if options.json:
        print(json.dumps(table, indent=2))
        return
    for layout, row in table.items():
        other = next(name for name in row if name.endswith("_s") and name != "rewritten_s")
        print(
            f"{layout:<24} rewritten {row['rewritten_s'] * 1e3:7.1f} ms   {other[:-2]} {row[other] * 1e3:7.1f} ms   "
            f"ratio {row['ratio']:.3f}   loss difference {row['loss_difference']:.1e}"
        )
        if "processor_ratio" in row:
            print(f"{'':<24} ratio of processor time, which says more on a busy machine: {row['processor_ratio']:.3f}")
        if "collectives" in row:
            moved = " and ".join(
                f"{n} of {mb:.2f} MB" for n, mb in zip(row["collectives"], row["megabytes"], strict=True)
            )
            print(f"{'':<24} collectives of a step, rewritten and other: {moved}")


def against_eager(rounds: int) -> dict[str, Any]:
    """Medians in seconds, their ratio, and the difference of the losses."""
    batch = next(batches())
    eager = build_model()
    rewritten = autopar.parallelize(
        build_model(),
        autopar.ClusterSpec.preset("local", nodes=1),
        train=autopar.TrainSpec(global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN),
        pins=autopar.Pins(microbatch=GLOBAL_BATCH, checkpoint="none"),
    )

    def eager_step() -> torch.Tensor:
        eager.zero_grad()
        loss: torch.Tensor = eager(**batch).loss
        loss.backward()
        return loss.detach()

    def rewritten_step() -> torch.Tensor:
        rewritten.zero_grad()
        return rewritten.step(batch).detach()

    times = interleaved({"eager": eager_step, "rewritten": rewritten_step}, rounds)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        "rewritten_s": medians["rewritten"],
        "eager_s": medians["eager"],
        "ratio": medians["rewritten"] / medians["eager"],
        "loss_difference": abs(eager_step().item() - rewritten_step().item()),
    }


def interleaved(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of every step, the order turned each round; the first rounds are not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UP_ROUNDS + rounds):
        names = list(steps) if turn % 2 == 0 else list(reversed(steps))
        for name in names:
            start = time.perf_counter()
            steps[name]()
            if turn >= WARM_UP_ROUNDS:
                times[name].append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
