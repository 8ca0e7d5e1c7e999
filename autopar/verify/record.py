"""One way of training, recorded: the same steps by the plain model and by the parallel one, to be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.binding import invoke
from autopar.errors import SpecError
from autopar.runtime.engine import ParallelModule
from autopar.shell import copied

__all__ = ["Record"]

_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-3}),
}


@dataclass(frozen=True)
class Record:
    """What one way of training gives: loss and gradients of the first step, weights by optimizer after all steps."""

    loss: float
    gradients: Mapping[str, Tensor | None]
    weights: Mapping[str, Mapping[str, Tensor]]

    @staticmethod
    def of_model(module: nn.Module, batch: Mapping[str, Any], steps: int) -> Record:
        """The plain model; it is left as it was."""
        trained = copied(module)

        def step() -> float:
            loss = _loss_of(invoke(trained, batch))
            loss.backward()
            for p in trained.parameters():
                if p.grad is not None and p.grad.is_sparse:  # few optimizers take it, and the parallel one is dense
                    p.grad = p.grad.to_dense()
            return loss.item()

        def gradients() -> dict[str, Tensor | None]:
            return {n: None if p.grad is None else p.grad.clone() for n, p in trained.named_parameters()}

        def new(cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> torch.optim.Optimizer:
            return cls([p for p in trained.parameters() if p.requires_grad], **options)

        return _record(trained, step, gradients, steps, module.state_dict(), new)

    @staticmethod
    def of_parallel(pm: ParallelModule, batch: Mapping[str, Any], steps: int, initial: Mapping[str, Tensor]) -> Record:
        new = lambda cls, options: pm.optimizer(cls, **options)  # noqa: E731
        return _record(pm, lambda: pm.step(batch).item(), pm.full_gradients, steps, initial, new)


def _record(
    trained: nn.Module,
    step: Callable[[], float],
    gradients: Callable[[], Mapping[str, Tensor | None]],
    steps: int,
    initial: Mapping[str, Tensor],
    new: Callable[[type[torch.optim.Optimizer], dict[str, Any]], torch.optim.Optimizer],
) -> Record:
    losses: list[float] = []
    first: dict[str, Tensor | None] = {}
    weights: dict[str, dict[str, Tensor]] = {}
    initial = {name: t.clone() for name, t in initial.items()}
    for name, (cls, options) in _OPTIMIZERS.items():
        trained.load_state_dict(initial)
        optimizer = new(cls, options)
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(step())
            first = first or dict(gradients())
            optimizer.step()
        weights[name] = {key: t.detach().clone() for key, t in trained.state_dict().items()}
    return Record(losses[0], first, weights)


def _loss_of(outputs: Any) -> Tensor:
    """The output named `loss`, or the one scalar that learns, as in the captured model."""
    if isinstance(outputs, Tensor):
        return outputs
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    scalars = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.dim() == 0 and x.requires_grad]
    if len(scalars) != 1:
        raise SpecError("the model returns no loss to compare", where="forward", try_="return it alone or as `loss`")
    return scalars[0]
