"""What one rank refuses, all its peers refuse, with its words: alone it would leave them waiting in a collective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime.world import World

__all__ = ["Agreement", "Refusal", "first_refusal", "raise_alike"]


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


class Agreement:
    """Whether a rank of the world has an error: asked now, answered later, by all of them.

    On CUDA the answer is copied to the host as soon as it is there, so that `answer` waits for what was under way when
    it was asked, not for what has been launched since.
    """

    def __init__(self, error: AutoparError | None, world: World) -> None:
        self._error, self._alone = error, world.alone
        self._copied: torch.cuda.Event | None = None
        if world.alone:
            return
        raised = torch.tensor(int(error is not None), device=world.device)
        dist.all_reduce(raised)
        self._raised = raised
        if raised.is_cuda:
            self._raised = torch.empty_like(raised, device="cpu", pin_memory=True).copy_(raised, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def answer(self) -> None:
        """Raise AutoparError on every rank if one of them has an error."""
        if self._alone:
            if self._error is not None:
                raise self._error
            return
        if self._copied is not None:
            self._copied.synchronize()
        if not int(self._raised):
            return
        first = first_refusal(self._error, dist.group.WORLD)
        raise self._error or AutoparError(
            f"{first.what} (told by rank {first.rank})", where=first.where, try_=first.try_
        )


def raise_alike(error: AutoparError | None, world: World) -> None:
    """Raise AutoparError on every rank if one of them has an `error`. Collective; one number is moved if there is
    none."""
    Agreement(error, world).answer()


def _words(error: BaseException) -> tuple[str, str, str]:
    if isinstance(error, AutoparError):
        return error.what, error.where, error.try_
    return f"{type(error).__name__}: {error}", "", ""
