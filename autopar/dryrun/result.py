"""What a dry run found, as text and as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from autopar.plan import Plan
from autopar.reports.quantities import bytes_text, count_text

__all__ = ["CollectiveRow", "DryRun", "MemoryRow", "RankReport"]

MEMORY_TOLERANCE = 0.05


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one category when the rank held most; `predicted` is None where nothing was predicted. "inputs" are the
    step's batch and the model's buffers, "communication" receive buffers, gathered parameters and gradients on their
    way; whole gradients that wait for the last micro-batch under ZeRO 1 are among the activations."""

    category: str
    measured: int
    predicted: int | None


@dataclass(frozen=True)
class CollectiveRow:
    """A collective of a step: `nbytes` of the whole tensor (of one rank for a send), `count` times, `predicted` times.

    purpose: "activations" (in every micro-batch), "boundary" (between stages), "gradients", "control" (tokens, loss).
    """

    purpose: str
    kind: str
    axis: str
    nbytes: int
    count: int
    predicted: int


@dataclass(frozen=True)
class RankReport:
    """One rank. `micro_batches_run` of the step's `micro_batches` were executed; they were alike."""

    rank: int
    stage: int
    parameters: int
    micro_batches: int
    micro_batches_run: int
    memory: tuple[MemoryRow, ...]
    collectives: tuple[CollectiveRow, ...]

    @property
    def collectives_agree(self) -> bool:
        return all(row.count == row.predicted for row in self.collectives)

    @property
    def memory_error(self) -> float | None:
        """(predicted - measured) / measured of the peak, None without a prediction."""
        total = self.memory[-1]
        return None if total.predicted is None else total.predicted / total.measured - 1

    @property
    def warnings(self) -> list[str]:
        error = self.memory_error
        if error is None or abs(error) <= MEMORY_TOLERANCE:
            return []
        return [f"rank {self.rank}: the peak of memory was predicted {100 * error:+.1f} % off what the rank holds"]


@dataclass(frozen=True)
class DryRun:
    """`broken_boundaries`: neighbouring stages that do not agree on the tensors between them."""

    plan: Plan
    ranks: tuple[RankReport, ...]
    notices: tuple[str, ...]
    broken_boundaries: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Every collective as predicted, every boundary whole."""
        return not self.broken_boundaries and all(rank.collectives_agree for rank in self.ranks)

    @property
    def warnings(self) -> list[str]:
        return [warning for rank in self.ranks for warning in rank.warnings]

    def to_data(self) -> dict[str, Any]:
        ranks = []
        for rank in self.ranks:
            data = asdict(rank)
            data["collectives_agree"], data["memory_error"] = rank.collectives_agree, rank.memory_error
            ranks.append(data)
        return {
            "agrees": self.agrees,
            "world_size": self.plan.degrees.world_size,
            "ranks": ranks,
            "broken_boundaries": list(self.broken_boundaries),
            "warnings": self.warnings,
            "notices": list(self.notices),
        }

    def text(self) -> str:
        lines = [line for rank in self.ranks for line in _rank_lines(rank, self.plan)]
        lines += [f"error: {broken}" for broken in self.broken_boundaries]
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [f"note: {notice}" for notice in self.notices]
        verdict = (
            "every collective is as predicted" if self.agrees else "DIFFERS: the rows marked ! are not as predicted"
        )
        return "\n".join([*lines, verdict]) + "\n"


def _rank_lines(rank: RankReport, plan: Plan) -> list[str]:
    place = ", ".join(f"{axis} {index}" for axis, index in sorted(plan.degrees.coordinates(rank.rank).items()))
    lines = [
        f"rank {rank.rank} of {plan.degrees.world_size} ({place}): {count_text(rank.parameters)} parameters",
        f"ran {rank.micro_batches_run} of the step's {rank.micro_batches} micro-batches, which were alike",
        "",
        f"{'memory at the peak':24}{'measured':>12}{'predicted':>12}",
    ]
    for row in rank.memory:
        predicted = "-" if row.predicted is None else bytes_text(row.predicted)
        lines.append(f"  {row.category:22}{bytes_text(row.measured):>12}{predicted:>12}")
    lines += ["", f"{'collectives of a step':48}{'bytes':>16}{'times':>10}{'predicted':>12}"]
    for c in rank.collectives:
        mark = " " if c.count == c.predicted else "!"
        lines.append(f"{mark} {c.purpose:14}{c.kind:18}{c.axis:14}{c.nbytes:>16,}{c.count:>10,}{c.predicted:>12,}")
    return [*lines, ""]
