"""What a step costs while training: time by part on every rank, stragglers, memory against the prediction.

    total = compute + exposed communication (tp, cp, dp) + bubble + optimizer + data

`compute` is what is left of `pm.step` when waits are taken off; `bubble` is waiting for other stages, with messages;
`optimizer` is inside `optimizer.step()`; `data` is all else between two steps: loading, and the user's own code.
Ranks exchange one small tensor every `every` steps, when rank 0 writes a record.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.checks import require_count
from autopar.errors import SpecError
from autopar.plan import Plan
from autopar.runtime.clock import WaitClock, attach, detach
from autopar.runtime.memory_advice import memory_advice
from autopar.runtime.output_paths import agree_on_writable
from autopar.runtime.world import World

__all__ = ["OPTIONS", "PARTS", "Monitor", "Record", "slow_ranks"]

PARTS = ("compute", "tp", "cp", "dp", "bubble", "optimizer", "data")
OPTIONS = ("every", "tensorboard", "memory_limit")
STRAGGLES = 1.15
"""A rank whose compute takes this much longer than the median of the ranks that run the same stage."""


@dataclass(frozen=True)
class Record:
    """Means over the steps since the last record.

    ranks        one mapping of PARTS to seconds a rank, in rank order
    imbalance    longest over mean compute of all ranks: 1 is balanced
    stragglers   ranks slower than their peers
    memory       peak bytes allocated by rank, empty where the device does not count
    predicted    bytes the plan expects by rank, empty if it does not say
    """

    step: int
    steps: int
    loss: float
    step_time_s: float
    tokens_per_s: float
    mfu: float | None
    ranks: Sequence[Mapping[str, float]]
    imbalance: float
    stragglers: Sequence[int]
    memory: Sequence[int] = ()
    predicted: Sequence[int] = ()
    advice: Sequence[str] = field(default_factory=tuple)

    def to_data(self) -> dict[str, Any]:
        """As JSON can hold it: a loss that is no finite number is None."""
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return {**plain, "loss": self.loss if math.isfinite(self.loss) else None}


class Monitor:
    """Measures the steps of one parallel module; `ParallelModule.monitor` makes it. Every method is collective.

    path: JSON lines, one a record; tensorboard: folder for its event files. Raises SpecError if that is not installed.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        *,
        path: str | Path | None,
        tensorboard: str | Path | None = None,
        every: int = 10,
        memory_limit: int | None = None,
    ) -> None:
        require_count(every, "monitor: every")
        self._plan, self._world, self._every = plan, world, every
        self._path = None if path is None else Path(path)
        writes = world.rank == 0
        agree_on_writable(world, self._path if writes else None, "monitor: path")
        board = None if tensorboard is None else Path(tensorboard)
        if board is not None:
            _require_tensorboard()
            agree_on_writable(world, board / "events" if writes else None, "monitor: tensorboard")
        self._writer = _board(board) if writes else None
        self._limit = memory_limit
        self.clock = WaitClock(world.device, world.axes_by_group())
        self.records: list[Record] = []
        self._seconds = dict.fromkeys(("total", "step", "optimizer"), 0.0)
        self._steps, self._tokens, self._step_index = 0, 0, 0
        self._begun_s: float | None = None
        self._loss: torch.Tensor | None = None
        self.open = True
        attach(self.clock)
        self._watched: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._optimizer_begun_s = 0.0
        # Hooks of all optimizers surround their own, which may gather and scatter (runtime/stand_ins.py).
        self._hooks = (
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        )

    def close(self) -> None:
        """Write what is left and stop measuring."""
        if not self.open:
            return
        self.open = False
        self._end_of_total()
        if self._steps:
            self._record()
        detach(self.clock)
        for hook in self._hooks:
            hook.remove()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> None:
        """A step starts; the one before it is over."""
        self._end_of_total()
        if self._steps == self._every:
            self._record()
        self._begun_s = time.perf_counter()

    def end(self, tokens: int, loss: torch.Tensor) -> None:
        """`pm.step` returns; `tokens` of all dp ranks."""
        assert self._begun_s is not None
        self._synchronize()
        self._seconds["step"] += time.perf_counter() - self._begun_s
        self._tokens += tokens
        self._loss = loss
        self._steps += 1
        self._step_index += 1

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the time inside its steps."""
        self._watched.add(optimizer)

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in self._watched:
            self._optimizer_begun_s = time.perf_counter()

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in self._watched:
            self._synchronize()
            self._seconds["optimizer"] += time.perf_counter() - self._optimizer_begun_s

    def _synchronize(self) -> None:
        if self.clock.cuda:
            torch.cuda.synchronize(self._world.device)

    def _end_of_total(self) -> None:
        if self._begun_s is not None:
            self._seconds["total"] += time.perf_counter() - self._begun_s
            self._begun_s = None

    def _record(self) -> None:
        everyone = self._gathered(self._own())
        memory = [int(row[-1]) for row in everyone]
        ranks = [dict(zip(PARTS, row[1:-1], strict=True)) for row in everyone]
        step_time_s = max(row[0] for row in everyone)
        compute = [parts["compute"] for parts in ranks]
        record = Record(
            step=self._step_index,
            steps=self._steps,
            loss=float(self._loss) if self._loss is not None else float("nan"),
            step_time_s=step_time_s,
            tokens_per_s=self._tokens / self._steps / step_time_s,
            mfu=_mfu(self._plan, self._tokens / self._steps, step_time_s),
            ranks=ranks,
            imbalance=max(compute) / statistics.mean(compute) if any(compute) else 1.0,
            stragglers=slow_ranks(compute, self._plan),
            memory=memory if any(memory) else [],
            predicted=_predicted_bytes(self._plan),
            advice=memory_advice(self._plan, memory, self._reserved(), self._limit),
        )
        self.records.append(record)
        if self._world.rank == 0:
            self._write(record)
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._steps, self._tokens = 0, 0

    def _own(self) -> list[float]:
        """Means of this rank: total, every part, and the peak of its memory."""
        waits, n = self.clock.take(), self._steps
        total, step, optimizer = (self._seconds[name] / n for name in ("total", "step", "optimizer"))
        exposed = {axis: waits.get(axis, 0.0) / n for axis in ("tp", "cp", "dp", "bubble")}
        exposed["dp"] += waits.get("other", 0.0) / n
        parts = {
            **exposed,
            "compute": max(0.0, step - sum(exposed.values())),
            "optimizer": optimizer,
            "data": max(0.0, total - step - optimizer),
        }
        peak = torch.cuda.max_memory_allocated(self._world.device) if self.clock.cuda else 0
        return [total, *(parts[name] for name in PARTS), float(peak)]

    def _gathered(self, mine: list[float]) -> list[list[float]]:
        if self._world.alone:
            return [mine]
        rows = torch.zeros(dist.get_world_size(), len(mine), dtype=torch.float64, device=self._world.device)
        rows[self._world.rank] = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(rows)
        gathered: list[list[float]] = rows.tolist()
        return gathered

    def _reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self._world.device) if self.clock.cuda else 0

    def _write(self, record: Record) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record.to_data(), allow_nan=False) + "\n")
        if self._writer is not None:
            for name in ("loss", "step_time_s", "tokens_per_s", "mfu", "imbalance"):
                if getattr(record, name) is not None:
                    self._writer.add_scalar(name, getattr(record, name), record.step)
            for part in PARTS:
                slowest = max(parts[part] for parts in record.ranks)
                self._writer.add_scalar(f"seconds/{part}", slowest, record.step)


def slow_ranks(compute_s: Sequence[float], plan: Plan) -> list[int]:
    """Ranks whose compute is far above the median of those that run the same stages."""
    peers: dict[int, list[int]] = {}
    for rank in range(len(compute_s)):
        peers.setdefault(plan.degrees.coordinates(rank)["pp"], []).append(rank)
    typical = {pp: statistics.median(compute_s[r] for r in ranks) for pp, ranks in peers.items()}
    return [r for pp, ranks in peers.items() for r in ranks if compute_s[r] > STRAGGLES * typical[pp]]


def _mfu(plan: Plan, tokens: float, seconds: float) -> float | None:
    """The prediction's, by how much slower or faster the measured tokens came. None if the plan holds none."""
    mfu, predicted_s = plan.prediction.get("mfu"), plan.prediction.get("step_time_s")
    if not mfu or not predicted_s:
        return None
    return float(mfu) * (tokens / (plan.global_batch * plan.seq_len)) * (float(predicted_s) / seconds)


def _predicted_bytes(plan: Plan) -> list[int]:
    stages = plan.prediction.get("peak_memory_bytes")
    if not stages:
        return []
    pp, degrees = plan.degrees.pp, plan.degrees
    by_rank = [sum(int(stage["total"]) for stage in stages[p::pp]) for p in range(pp)]
    return [by_rank[degrees.coordinates(rank)["pp"]] for rank in range(degrees.world_size)]


def _require_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise SpecError("tensorboard is not installed", where="monitor: tensorboard", try_="pip install tensorboard")


def _board(folder: Path | None) -> Any:
    if folder is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
