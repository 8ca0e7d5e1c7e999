"""Files that ranks write while training: found out before the first step whether they can, and told to all ranks.

A rank that failed to write its record in the middle of a run would leave the others waiting for it.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from autopar.errors import SpecError
from autopar.runtime.world import World

__all__ = ["agree_on_writable"]


def agree_on_writable(world: World, path: Path | None, where: str) -> None:
    """Make the folder of `path`, where this rank is to write it (None: it is not). Raises SpecError on every rank if
    one of them cannot. Collective."""
    reason = "" if path is None else _why_not(path)
    if not world.alone:
        reasons = [""] * dist.get_world_size()
        dist.all_gather_object(reasons, reason and f"rank {world.rank}: {reason}")
        reason = next(filter(None, reasons), "")
    if reason:
        raise SpecError(reason, where=where, try_="a path in a folder that can be written")


def _why_not(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        return f"cannot write {path}: {error.strerror}"
    return ""
