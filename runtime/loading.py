"""What is given to be loaded, looked at before anything is changed, on all ranks alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from autopar.errors import AutoparError
from autopar.runtime.agreement import raise_alike
from autopar.runtime.world import World

__all__ = ["check_loadable", "checksum"]


def check_loadable(
    state: Any, keys: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], strict: bool, world: World
) -> _IncompatibleKeys:
    """What is missing of `keys` (-> name of the tensor, which may have several) and what is unknown. Collective.

    Raises AutoparError on every rank: with `strict` for any of that; for what is no plain tensor of the whole shape
    (`shapes`, by name), and for tensors of which ranks were given different values.
    """
    error, unlike = None, _IncompatibleKeys([], [])
    try:
        unlike = _compared(state, keys, strict)
        _refuse_misfits(state, keys, shapes)
    except AutoparError as found:
        error = found
    raise_alike(error, world)
    if not world.alone:
        _refuse_differing({key: int(checksum(state[key])) for key in keys if key in state})
    return unlike


def _compared(state: Any, keys: Mapping[str, str], strict: bool) -> _IncompatibleKeys:
    if not isinstance(state, Mapping):
        raise AutoparError(f"a {type(state).__name__}, no mapping of names to tensors", where="load_state_dict")
    given = {name for key, name in keys.items() if key in state}
    missing, unknown = [k for k, name in keys.items() if name not in given], [k for k in state if k not in keys]
    if strict and (missing or unknown):
        raise AutoparError(f"missing {missing or 'none'}, unknown {unknown or 'none'}", where="load_state_dict")
    return _IncompatibleKeys(missing, unknown)


def _refuse_misfits(state: Mapping[str, Any], keys: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for key, name in keys.items():
        value = state.get(key)
        if key in state and (not isinstance(value, Tensor) or isinstance(value, DTensor) or value.is_meta):
            kind = "meta tensor" if isinstance(value, Tensor) and value.is_meta else type(value).__name__
            raise AutoparError(f"a {kind}", where=key, try_="whole plain tensors, as pm.state_dict() gives")
        if value is not None and name in shapes and tuple(value.shape) != shapes[name]:
            raise AutoparError(f"shape {tuple(value.shape)}, expected {shapes[name]}", where=key)


def _refuse_differing(mine: dict[str, int]) -> None:
    told: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    for rank, other in enumerate(told):
        for key, value in other.items():
            if told[0].get(key, value) != value:
                raise AutoparError(
                    f"ranks 0 and {rank} load different values", where=key, try_="the same file everywhere"
                )


def checksum(tensor: Tensor) -> Tensor:
    """Sum of the bits as integers, wrapping: equal tensors have equal sums, differently seeded ones do not."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(integers[flat.element_size()]).sum(dtype=torch.int64)
