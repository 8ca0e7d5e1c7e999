"""What a user may do to parameters that a parallel run would not notice, refused by name before the step that would
train another model.

Where FSDP or a 16-bit copy computes in a parameter's place, autograd never comes to it, and its hooks are never called.
A parameter that was frozen when the model was captured has no place in any reduction.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.runtime.agreement import Agreement
from autopar.runtime.state import LocalState
from autopar.runtime.world import World

__all__ = ["ParameterWatch", "refuse_hooks"]

_INSTEAD = "change p.grad between pm.step and optimizer.step, where gradients are complete"


class ParameterWatch:
    """Of this rank's parameters as they are now.

    One rank alone may see what all have to refuse: stages hold different ones, and users may treat ranks differently.
    They agree in every step, if any of them has something to watch. Collective, as is `check`.
    """

    def __init__(self, state: LocalState, world: World) -> None:
        held, copies = state.parameters, state.copies.of
        # FSDP, or a copy in 16 bits, computes in their place.
        self._replaced = {n: (p, _hooks(p)) for n, p in held.items() if state.divides(n) or copies.get(n, p) is not p}
        reduces = self._replaced or not world.alone
        self._frozen = {name: p for name, p in held.items() if reduces and not p.requires_grad}
        self._world = world
        watched = torch.tensor([len(self._replaced), len(self._frozen)], device=world.device)
        hooked, thawed = world.sum(watched, "pp").tolist()
        self._watches = hooked + thawed > 0
        # A thawed parameter has collectives of its own under FSDP, and messages of its own between stages.
        self._at_once = world.alone or world.size("pp") > 1 or thawed > 0

    def check(self) -> Agreement | None:
        """Look for hooks that nothing calls, and for parameters that were frozen and are not any more: AutoparError on
        every rank. If that is in nobody's way, it comes from `answer` of what is returned, at the end of the step."""
        if not self._watches:
            return None
        found = Agreement(next(self._errors(), None), self._world)
        if not self._at_once:
            return found
        found.answer()
        return None

    def _errors(self) -> Iterator[AutoparError]:
        for name, (p, before) in self._replaced.items():
            if _hooks(p) != before:
                yield AutoparError("nothing calls a hook on this parameter", where=name, try_=_INSTEAD)
        for name, p in self._frozen.items():
            if p.requires_grad:
                yield AutoparError(
                    "was frozen when the model was captured, and its gradient is reduced nowhere",
                    where=name,
                    try_="parallelize with everything trainable that ever will be, then p.requires_grad_(False)",
                )


def refuse_hooks(model: nn.Module) -> None:
    """Raise AutoparError for hooks on the parameters of the user's model: ranks train copies, which have none."""
    for name, p in model.named_parameters():
        if any(_hooks(p)):
            raise AutoparError("ranks train copies of this parameter, without its hooks", where=name, try_=_INSTEAD)


def _hooks(p: nn.Parameter) -> tuple[int, int]:
    """Tensor hooks, and hooks after accumulation."""
    after = getattr(p, "_post_accumulate_grad_hooks", None)
    return len(p._backward_hooks or ()), len(after or ())
