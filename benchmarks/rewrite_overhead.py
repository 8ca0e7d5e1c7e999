"""Step time of the rewritten graph on one process against the eager model it was captured from.

    python benchmarks/rewrite_overhead.py [--rounds 15]

The demo's model and batch, forward and backward, no optimizer. Both are measured in turns within one run, so that
whatever else the machine does falls on both; the figure is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import autopar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from train_llama import GLOBAL_BATCH, SEQ_LEN, batches, build_model

WARM_UP_ROUNDS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description="rewritten graph against eager, one process")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds

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
    print(f"loss: eager {eager_step():.6f}, rewritten {rewritten_step():.6f}")
    for name, median in medians.items():
        print(f"{name:9}  median {1e3 * median:7.1f} ms  ({min(times[name]) * 1e3:.1f} - {max(times[name]) * 1e3:.1f})")
    print(f"ratio      {medians['rewritten'] / medians['eager']:.3f}  over {rounds} interleaved rounds")


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
