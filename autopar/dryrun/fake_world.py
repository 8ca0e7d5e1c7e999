"""One rank of a world of any size in this process: a process group that communicates with nobody."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import AutoparError
from autopar.mesh import AXES, Degrees
from autopar.runtime.world import World

__all__ = ["FakeWorld", "fake_process_group"]


@contextlib.contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """A default process group in which this process is `rank`; collectives return at once and move nothing.

    Raises AutoparError if the process already belongs to one.
    """
    if dist.is_initialized():
        raise AutoparError(
            "this process already belongs to a process group", where="dry run", try_="a process of its own"
        )
    # Importing it registers the backend. It is torch's own, for this very purpose, though it lives among its tests.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class FakeWorld(World):
    """A rank's place and groups without the other ranks: nothing is agreed on, because there is nobody to agree with.

    Needs `fake_process_group` of the same rank and size, unless the world has one rank.
    """

    def __init__(self, degrees: Degrees, rank: int) -> None:
        self.degrees, self.rank, self.device = degrees, rank, torch.device("cpu")
        self.position = degrees.coordinates(rank)
        self.mesh = None
        if degrees.world_size > 1:
            self.mesh = init_device_mesh("cpu", degrees.shape, mesh_dim_names=AXES)
        if self.mesh is not None and self.size("cp") > 1 and self.size("dp") == 1:
            # The data ranks are those of cp: a second group of them tells what is sent for parameters from the rest.
            group = dist.new_group([self.global_rank("cp", i) for i in range(self.size("cp"))])
            self._data = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("data",))
        self.data_mesh  # noqa: B018 - made here, outside of the mode in which tensors hold nothing

    def data_group(self, over_cp: bool) -> dist.ProcessGroup | None:
        if over_cp and self.data_mesh is not None and self.size("dp") == 1:
            return self.data_mesh.get_group()
        return super().data_group(over_cp)

    def axis_of(self, group_name: str) -> str:
        """The mesh axis whose process group has that name."""
        names = self.group_names()
        if self.data_mesh is not None:
            data = " and ".join(axis for axis in ("dp", "cp") if self.size(axis) > 1)
            names = {data: self.data_mesh.get_group().group_name} | names
        if group_name in names.values():
            return next(axis for axis, name in names.items() if name == group_name)
        if self.data_mesh is not None and group_name == self.data_mesh.get_group().group_name:
            return data
        return self.hybrid_groups().get(group_name, "world")

    def hybrid_groups(self) -> dict[str, str]:
        """Process groups of hybrid sharding -> "copies" or "shards"."""
        if self._hybrid is None:
            return {}
        return {self._hybrid.get_group(axis).group_name: axis for axis in ("copies", "shards")}
