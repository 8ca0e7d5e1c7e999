"""`torch.export` of a user's model on fake tensors, with every size of its inputs a symbol.

Non-strict mode runs the user's own Python once; equal layers are run once for all where that gives the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.capture_errors import explain_failure, export_is_quiet
from autopar.equal_layers import LayerNumberError
from autopar.example_call import fake_call, rebuilder
from autopar.grad_regions import inline_no_grad
from autopar.opaque_functions import OpaqueCalls
from autopar.repeated_layers import LayerGraph, Repeats, layer_graphs
from autopar.shell import CallShell, make_shell
from autopar.value_branches import masks_unread

__all__ = ["Exported", "LossFn", "export"]

LossFn = Callable[[Any, Mapping[str, Any]], torch.Tensor]

_KEPT_WHOLE = (
    "the autograd.Function {} is kept whole, with its own backward: it is taken to treat the rows of a batch apart"
)


@dataclass(frozen=True)
class Exported:
    """An exported program with what is needed to read it; `repeated` are the paths of layers to fill in."""

    program: torch.export.ExportedProgram
    shell: nn.Module
    unknown_buffers: tuple[str, ...]
    layers: dict[int, LayerGraph]
    repeated: tuple[str, ...]
    notices: tuple[str, ...]


def export(
    model: nn.Module,
    arguments: dict[str, Any],
    leaves: Mapping[str, Any],
    loss_fn: LossFn | None,
    accepted: frozenset[str],
    parameter_dtype: torch.dtype | None,
    *,
    training: bool | None,
    repeat: bool,
) -> Exported | None:
    """None if layers were repeated that may not be."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=False)
    shell, unknown_buffers = make_shell(model, mode, parameter_dtype)
    if training is not None:
        shell.train(training)
    fake, dynamic = fake_call({n: v for n, v in leaves.items() if isinstance(v, torch.Tensor)}, mode)
    call = CallShell(shell, loss_fn, accepted, rebuilder(arguments))
    repeats = Repeats(call) if repeat else None
    opaque = OpaqueCalls()
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            opaque.kept_whole(),
            masks_unread(),
            export_is_quiet(),
        ):
            program = torch.export.export(call, (fake,), strict=False, dynamic_shapes=(dynamic,))
    except LayerNumberError:
        return None
    except Exception as error:  # export raises dozens of unrelated classes; all become one with the module path
        if repeats is not None and (repeats.paths or not repeats.trusted):
            return None
        raise explain_failure(error, call) from error
    inline_no_grad(program.graph_module)
    notices = [_KEPT_WHOLE.format(name) for name in opaque.put_back(program.graph)]
    layers = layer_graphs(program.graph, repeats) if repeats is not None else {}
    if layers is None:
        return None
    return Exported(
        program, shell, tuple(unknown_buffers), layers, repeats.user_paths if repeats else (), tuple(notices)
    )
