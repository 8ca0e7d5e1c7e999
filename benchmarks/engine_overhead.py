"""Step time of the engine against the loops one writes by hand with torch: DDP, FSDP2, pipelining; and of monitoring.

Two gloo processes on this machine run both sides in turns in one run, the order turned each round; the figure is the
ratio of the medians of a round's slowest rank. The same model, batch, micro-batches and kernels on both sides.

    python benchmarks/engine_overhead.py [--rounds 31] [--only ddp fsdp2 pipeline monitor] [--json]

Beside it stands the ratio of the processor seconds that a step takes, of all threads and ranks: on a machine that
others use, wall time says more about them.

Targets: at most 1.03 beside the loop by hand, at most 1.01 for a monitored step beside one that is not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tensor_parallel import LAYERS, Block, Decoder, new_batch, new_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from autopar.build import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.clock import attach, detach
from autopar.runtime.engine import ParallelModule
from autopar.runtime.launch import run_ranks
from autopar.trace import trace

ROWS, SEQ, MICRO_BATCHES = 8, 64, 4
TARGETS = {"ddp": 1.03, "fsdp2": 1.03, "pipeline": 1.03, "monitor": 1.01}
Step = Callable[[], float]


def _engine(degrees: Degrees, zero: int = 0) -> tuple[Step, ParallelModule]:
    per_rank = ROWS // degrees.dp
    stages = tuple((f"blocks.{i}-{i + LAYERS // degrees.pp - 1}",) for i in range(0, LAYERS, LAYERS // degrees.pp))
    plan = Plan(
        degrees=degrees, global_batch=ROWS, seq_len=SEQ, micro_batch=per_rank // MICRO_BATCHES, stages=stages, zero=zero
    )  # fmt: skip
    pm = build(new_model(), prepare(trace(new_model(), new_batch(ROWS, SEQ))), plan)
    optimizer = pm.optimizer(torch.optim.SGD, lr=1e-4)
    batch = new_batch(ROWS, SEQ)

    def step() -> float:
        loss = pm.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, pm


def _mine() -> list[dict[str, Tensor]]:
    """This dp rank's micro-batches."""
    rank, each = dist.get_rank(), ROWS // dist.get_world_size()
    own = {name: t[rank * each : (rank + 1) * each] for name, t in new_batch(ROWS, SEQ).items()}
    parts = {name: t.chunk(MICRO_BATCHES) for name, t in own.items()}
    return [{name: pieces[i] for name, pieces in parts.items()} for i in range(MICRO_BATCHES)]


def _agreed(losses: list[Tensor]) -> float:
    """The mean over micro-batches and ranks, on every rank: both sides return the loss."""
    total = torch.stack(losses).sum() / MICRO_BATCHES / dist.get_world_size()
    dist.all_reduce(total)
    return total.item()


def _accumulating(model: Any, part: Callable[[bool], contextlib.AbstractContextManager[None]]) -> Step:
    """A step of `model` over this rank's micro-batches; each runs within `part(whether it is the last)`."""
    optimizer, micro_batches = torch.optim.SGD(model.parameters(), lr=1e-4), _mine()

    def step() -> float:
        losses = []
        for i, inputs in enumerate(micro_batches):
            with part(i == MICRO_BATCHES - 1):
                loss = model(**inputs) / MICRO_BATCHES
                loss.backward()
                losses.append(loss.detach() * MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()
        return _agreed(losses)

    return step


def _ddp() -> Step:
    model = DistributedDataParallel(new_model())
    return _accumulating(model, lambda last: contextlib.nullcontext() if last else model.no_sync())


def _fsdp2() -> Step:
    model: Any = new_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)

    def part(last: bool) -> contextlib.AbstractContextManager[None]:
        model.set_is_last_backward(last)
        return contextlib.nullcontext()

    return _accumulating(model, part)


class _Stage(nn.Module):
    def __init__(self, whole: Decoder, index: int, count: int) -> None:
        super().__init__()
        each = LAYERS // count
        self.blocks: list[Block] = list(whole.blocks)[index * each : (index + 1) * each]  # type: ignore[assignment]
        self.held = nn.ModuleList(self.blocks)
        self.embed = whole.embed if index == 0 else None
        self.head = whole.head if index == count - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        for block in self.blocks:
            x = block(x)
        return self.head(x) if self.head is not None else x


def _pipeline() -> Step:
    rank, count = dist.get_rank(), dist.get_world_size()
    module, batch = _Stage(new_model(), rank, count), new_batch(ROWS, SEQ)
    stage = PipelineStage(module, rank, count, torch.device("cpu"))
    loss_fn = lambda out, target: nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())  # noqa: E731
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)

    def step() -> float:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch["ids"])
        else:
            schedule.step(target=batch["labels"], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros(())
        dist.broadcast(total, count - 1)
        return total.item()

    return step


def _sides(name: str) -> dict[str, Step]:
    if name == "monitor":
        plain, _ = _engine(Degrees(dp=2))
        monitored, pm = _engine(Degrees(dp=2))
        return {"not monitored": plain, "monitored": _with_monitor(monitored, pm)}
    degrees = Degrees(pp=2) if name == "pipeline" else Degrees(dp=2)
    by_hand = {"ddp": _ddp, "fsdp2": _fsdp2, "pipeline": _pipeline}[name]()
    return {"by hand": by_hand, "engine": _engine(degrees, 3 if name == "fsdp2" else 0)[0]}


def _with_monitor(step: Step, pm: ParallelModule) -> Step:
    """Measured while it runs and not while the other side does."""

    clock = pm.monitor(every=10).clock
    detach(clock)

    def monitored() -> float:
        attach(clock)
        try:
            return step()
        finally:
            detach(clock)

    return monitored


def _measure(name: str, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    sides = _sides(name)
    times: dict[str, list[float]] = {side: [] for side in sides}
    processor: dict[str, list[float]] = {side: [] for side in sides}
    losses = {side: step() for side, step in sides.items()}
    for turn in range(rounds + 2):
        for side in list(sides) if turn % 2 else list(reversed(sides)):
            dist.barrier()
            start, started = time.perf_counter(), time.process_time()
            sides[side]()
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            spent = torch.tensor(time.process_time() - started, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(spent)
            if turn >= 2:
                times[side].append(float(slowest))
                processor[side].append(float(spent))
    medians = [{side: statistics.median(t) for side, t in kind.items()} for kind in (times, processor)]
    return {"losses": losses, "seconds": medians[0], "processor_s": medians[1], "times": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--only", nargs="*", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    table = {}
    for name in options.only:
        table[name] = run_ranks(2, _measure, name, options.rounds, timeout_s=600)[0]
        (first, one), (second, other) = table[name]["seconds"].items()
        table[name]["ratio"] = other / one
        first_cpu, second_cpu = table[name]["processor_s"].values()
        table[name]["processor_ratio"] = second_cpu / first_cpu
        if not options.json:
            losses = list(table[name]["losses"].values())
            print(
                f"{name:9} {first} {one * 1e3:7.1f} ms   {second} {other * 1e3:7.1f} ms   ratio {other / one:.3f} "
                f"(target {TARGETS[name]}), of processor time {second_cpu / first_cpu:.3f}   "
                f"loss difference {abs(losses[0] - losses[1]):.1e}",
                flush=True,
            )
    if options.json:
        print(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
