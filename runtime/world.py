"""The processes of a plan: who holds which place, their groups, and what they must agree on before they start."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import PlanMismatchError
from autopar.mesh import AXES, Degrees
from autopar.plan import Plan
from autopar.runtime.clock import waiting

__all__ = ["World"]

_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[object, DeviceMesh]] = WeakKeyDictionary()
"""Of each default process group, by what they are: a process that builds many modules (verify, tests) makes their
groups once. Nobody could say when to end them, and every group of gloo has threads of its own, which poll."""


class World:
    """This process's place in the mesh of a plan. Alone, without process groups, when the plan has one rank.

    Collective: every rank builds it with the same plan. Raises PlanMismatchError on every rank if the plans differ or
    the plan is for another number of ranks.
    """

    _data: DeviceMesh | None = None
    _hybrid: DeviceMesh | None = None

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.degrees: Degrees = plan.degrees
        self.device = device
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size > 1:
            _agree_on(plan, device)
        if size != plan.degrees.world_size:
            degrees = ", ".join(f"{axis} {getattr(plan.degrees, axis)}" for axis in AXES)
            wanted = f"{plan.degrees.world_size} process{'es' if plan.degrees.world_size > 1 else ''}"
            raise PlanMismatchError(
                f"the plan is for {wanted} ({degrees}), {size} {'are' if size > 1 else 'is'} running",
                try_=f"torchrun with {wanted}, or plan again for {size}",
            )
        self.rank = dist.get_rank() if size > 1 else 0
        self.position = plan.degrees.coordinates(self.rank)
        self.mesh: DeviceMesh | None = None
        if size > 1:
            self.mesh = self._new_mesh(plan.degrees.shape, AXES)
        self.data_mesh  # noqa: B018 - its groups are made here, where every rank takes part

    def _new_mesh(self, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        kind = self.device.type
        return _once((kind, sizes, names), lambda: init_device_mesh(kind, sizes, mesh_dim_names=names))

    @property
    def alone(self) -> bool:
        return self.mesh is None

    def size(self, axis: str) -> int:
        size: int = getattr(self.degrees, axis)
        return size

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Process group of this rank's peers on `axis`, None if it has none."""
        if self.mesh is None or self.size(axis) == 1:
            return None
        return self.mesh.get_group(axis)

    @property
    def data_mesh(self) -> DeviceMesh | None:
        """The ranks that train on different data (over dp and cp) with this rank's slice of the model, as one axis."""
        if self.mesh is None or self.size("dp") * self.size("cp") == 1:
            return None
        if self._data is None:
            # Collective the first time: every rank builds a World and asks.
            mesh = self.mesh
            self._data = _once((self.device.type, mesh.shape, "data"), lambda: mesh["dp", "cp"]._flatten("data"))
        return self._data

    def shard_mesh(self, group: int) -> DeviceMesh:
        """The mesh ZeRO shards over: all data ranks, or (copies, shards) if only `group` dp ranks, with their cp peers,
        share a copy. Collective the first time.
        """
        data, size = self.data_mesh, group * self.size("cp")
        assert data is not None
        if size in (0, data.size()):
            return data
        if self._hybrid is None:
            sizes = (self.size("pp"), data.size() // size, size, self.size("tp"))
            self._hybrid = self._new_mesh(sizes, ("pp", "copies", "shards", "tp"))["copies", "shards"]
        return self._hybrid

    def data_group(self, over_cp: bool) -> dist.ProcessGroup | None:
        """This rank's peers over dp, and over cp too if asked for; None if there are none."""
        if not over_cp or self.size("cp") == 1:
            return self.group("dp")
        if self.size("dp") == 1:
            return self.group("cp")
        return None if self.data_mesh is None else self.data_mesh.get_group()

    def group_names(self) -> dict[str, str]:
        """Axis -> c10d group name, for the axes larger than one; what `collectives.bind` takes."""
        groups = {axis: self.group(axis) for axis in AXES}
        return {axis: group.group_name for axis, group in groups.items() if group is not None}

    def axes_by_group(self) -> dict[str, str]:
        """Name of every process group -> the axis that waiting for it counts to; pipeline peers are "bubble"."""
        meshes = [mesh for mesh in (self._data, self._hybrid) if mesh is not None]
        names = {str(mesh.get_group(i).group_name): "dp" for mesh in meshes for i in range(mesh.ndim)}
        names |= {
            group: axis for axis, group in self.group_names().items()
        }  # without dp the data ranks are those of cp
        return {group: "bubble" if axis == "pp" else axis for group, axis in names.items()}

    def global_rank(self, axis: str, index: int) -> int:
        """The rank at `index` on `axis` that shares this rank's other coordinates."""
        return self.degrees.rank(**{**self.position, axis: index})

    def sum(self, value: Tensor, axis: str) -> Tensor:
        """Sum of `value` over `axis`; `value` itself if the axis is 1."""
        group = self.group(axis)
        if group is None:
            return value
        total = value.clone()
        with waiting(group):
            dist.all_reduce(total, group=group)
        return total

    def broadcast(self, value: Tensor, axis: str, index: int) -> None:
        """Overwrite `value` by that of the peer at `index` on `axis`."""
        group = self.group(axis)
        if group is not None:
            with waiting(group):
                dist.broadcast(value, src=self.global_rank(axis, index), group=group)


def _once(key: object, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    world = dist.group.WORLD
    assert world is not None
    known = _meshes.setdefault(world, {})
    if key not in known:
        known[key] = make()
    return known[key]


def _agree_on(plan: Plan, device: torch.device) -> None:
    mine = int(plan.fingerprint, 16) - 2**63
    everyone = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    everyone[dist.get_rank()] = mine
    dist.all_reduce(everyone)
    others = (everyone != everyone[0]).nonzero().flatten().tolist()
    if others:
        raise PlanMismatchError(
            f"ranks {', '.join(map(str, others))} hold another plan than rank 0",
            try_="load the same plan file on every rank, or let rank 0 plan and the others read it",
        )
