"""What a user may do to parameters that a parallel run would not notice, refused by name before the step that would
train another model.

Where FSDP or a 16-bit copy computes in a parameter's place, autograd never comes to it, and its hooks are never called.
A parameter that was frozen when the model was captured has no place in any reduction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from autopar.errors import AutoparError

__all__ = ["ParameterWatch", "refuse_hooks"]

_INSTEAD = "change p.grad between pm.step and optimizer.step, where gradients are complete"


class ParameterWatch:
    """Of `parameters` by original name as they are now; others compute in place of those named `replaced`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], replaced: Collection[str]) -> None:
        self._replaced = {name: (p, _hooks(p)) for name, p in parameters.items() if name in replaced}
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}

    def check(self) -> None:
        """Raise AutoparError for hooks that nothing calls, and for parameters that were frozen and are not any more."""
        for name, (p, before) in self._replaced.items():
            if _hooks(p) != before:
                raise AutoparError("nothing calls a hook on this parameter", where=name, try_=_INSTEAD)
        for name, p in self._frozen.items():
            if p.requires_grad:
                raise AutoparError(
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
