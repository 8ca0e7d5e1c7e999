"""What one rank refuses, all its peers refuse, with its words: alone it would leave them waiting in a collective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime.world import World

__all__ = ["Refusal", "first_refusal", "raise_alike"]


@dataclass(frozen=True)
class Refusal:
    """What `rank` of a group raised; see AutoparError."""

    rank: int
    what: str
    where: str
    try_: str


def first_refusal(error: BaseException | None, group: dist.ProcessGroup | None) -> Refusal:
    """Of the lowest rank of `group` (None: this rank alone) that has an `error`; one of them does. Collective."""
    mine = None if error is None else _words(error)
    told: list[tuple[str, str, str] | None] = [mine]
    if group is not None:
        told *= group.size()
        dist.all_gather_object(told, mine, group=group)
    return next(Refusal(rank, *words) for rank, words in enumerate(told) if words is not None)


def raise_alike(error: AutoparError | None, world: World) -> None:
    """Raise AutoparError on every rank if one of them has an `error`. Collective; one number is moved if there is
    none."""
    if world.alone:
        if error is not None:
            raise error
        return
    # On the CPU where a backend is: on a GPU every rank's host would wait for all that is under way there.
    device = torch.device("cpu") if "gloo" in str(dist.get_backend_config()) else world.device
    raised = torch.tensor(int(error is not None), device=device)
    dist.all_reduce(raised)
    if not int(raised):
        return
    first = first_refusal(error, dist.group.WORLD)
    raise error or AutoparError(f"{first.what} (told by rank {first.rank})", where=first.where, try_=first.try_)


def _words(error: BaseException) -> tuple[str, str, str]:
    if isinstance(error, AutoparError):
        return error.what, error.where, error.try_
    return f"{type(error).__name__}: {error}", "", ""
