"""Which of the overlaps a plan names are applied, layer by layer, and why the others are not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby

from autopar.plan import DEFAULT_OVERLAP, Plan

__all__ = ["AppliedOverlap"]


class AppliedOverlap:
    """`unapplied`: (layer, name, reason) of what the rewriting could not do; see `StageGraph`."""

    def __init__(self, plan: Plan, unapplied: Sequence[tuple[str, str, str]]) -> None:
        self._layers = [path for stage in plan.layer_paths() for path in stage]
        self._names = plan.overlap
        reasons = {(path, name): reason for path, name, reason in unapplied}
        for name in plan.overlap:
            reason = _why_nowhere(name, plan)
            if reason is not None:
                reasons.update(dict.fromkeys(((path, name) for path in self._layers), reason))
        self._reasons = reasons

    def text(self) -> str:
        """A line for every name and run of layers with the same answer."""
        lines = []
        for name in self._names:
            for reason, where in self._runs(name):
                lines.append(f"overlap {name}: {'applied' if reason is None else f'not applied ({reason})'}, {where}")
        return "\n".join(lines)

    def warn(self) -> list[str]:
        """A warning for every run of layers that lacks what was asked for beyond the defaults; what was said."""
        said = []
        for name in self._names:
            if name in DEFAULT_OVERLAP:
                continue  # on wherever it can be; where there is nothing to hide nobody misses it
            for reason, where in self._runs(name):
                if reason is not None:
                    said.append(f"overlap {name} is not applied to {where}: {reason}")
        for text in said:
            warnings.warn(text, stacklevel=2)
        return said

    def _runs(self, name: str) -> Iterator[tuple[str | None, str]]:
        for reason, paths in groupby(self._layers, lambda path: self._generic(path, name)):
            run = list(paths)
            yield reason, run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}"

    def _generic(self, path: str, name: str) -> str | None:
        """The reason without the layer's own path, so that equal layers make one line."""
        reason = self._reasons.get((path, name))
        return None if reason is None else reason.replace(f"{path}.", "").replace(f"{path}::", "")


def _why_nowhere(name: str, plan: Plan) -> str | None:
    """Why this plan has nothing that `name` could hide, or None."""
    degrees = plan.degrees
    absent = {
        "dp_reduce": (degrees.dp * degrees.cp == 1, "one data rank, no gradients to reduce"),
        "tp_linear": (degrees.tp == 1, "tp is 1"),
        "tp_ring": (degrees.tp == 1, "tp is 1"),
        "cp_ring": (degrees.cp == 1 or plan.context_parallel != "ring", "no ring attention"),
        "zero3_gather": (plan.zero != 3 or degrees.dp * degrees.cp == 1, "parameters are not sharded"),
        "pp_send": (degrees.pp == 1, "pp is 1"),
    }
    if name == "pp_send" and plan.schedule == "gpipe":
        return "schedule gpipe sends when a forward ends"
    missing, reason = absent[name]
    return reason if missing else None
