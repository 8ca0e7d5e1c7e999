"""Parameters and buffers: what this rank holds of the user's model, and how to see them whole again.

Names are always the original ones. A parameter lies on every stage that uses it; its tensor is a slice over tp.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from autopar.errors import AutoparError, SpecError
from autopar.ir import ParameterShard, StageGraph
from autopar.plan import Plan
from autopar.runtime.initial_weights import InitialWeights
from autopar.runtime.loading import check_loadable, checksum
from autopar.runtime.precision import ComputeCopies
from autopar.runtime.sharding import copies_group, copy_whole, filled_up, join_shards, local_part, local_slice
from autopar.runtime.world import World

__all__ = ["LocalState"]


class LocalState:
    """This rank's parameters (`parameters`, in execution order) and buffers, by original name.

    `copies` are what computes where the plan's precision is mixed; `parameters` then are the masters.
    Alone, the parameters are the user's own objects; otherwise copies, so that the user's model stays whole. Ranks that
    built their models from different seeds take rank 0's tensors and say so in `notices`. Collective.
    """

    def __init__(self, model: nn.Module, stages: Sequence[StageGraph], world: World, plan: Plan, seed: int = 0) -> None:
        self.notices: list[str] = []
        self._stages, self._world = stages, world
        self._keys = list(model.state_dict())
        everything: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self._canonical = _canonical_names(everything)
        names = tuple(dict.fromkeys(self._canonical.values()))
        computed = _computed_buffers(stages)
        initial = InitialWeights(model, seed)
        initial.refuse_lost()
        whole = {n: computed.get(n, everything[n]) for n in names}
        # Weights are made below; a buffer that no stage reads and no state_dict holds has no value anybody needs.
        needless = {n for n, t in whole.items() if t.is_meta and (n in initial or n not in self._keys)}
        whole = {n: t for n, t in whole.items() if n not in needless}
        _refuse_meta(whole)
        if not world.alone and whole:
            whole = self._same_as_rank_zero(whole)
        ranks = world.size("pp")
        self.own_stages = tuple(stages[world.position["pp"] :: ranks])
        self.shards: dict[str, ParameterShard] = _shards(self.own_stages)
        # A meta-built model's weights are made one module at a time and only the slice is kept.
        self.parameters = {
            name: self._place(whole[name] if name in whole else nn.Parameter(initial[name]), shard)
            for name, shard in self.shards.items()
        }
        self._level = plan.zero if world.data_mesh is not None else 0
        # What FSDP shards it casts itself.
        self.copies = ComputeCopies({n: p for n, p in self.parameters.items() if not self.divides(n)}, plan)
        used = {s.name for any_stage in stages for s in any_stage.parameters.values()}
        # Buffers are small and may be needed by any stage; parameters outside the graph never get a gradient.
        changeable = dict(model.named_buffers())
        self.buffers = {
            n: t if world.alone else t.detach().to(world.device, copy=n in changeable)
            for n, t in whole.items()
            if n not in used
        }
        self._order = [name for name in names if name in self.parameters]

    @property
    def cuts_tensors(self) -> bool:
        """Whether ranks may hold slices of parameters: over tp, or over the data ranks under ZeRO."""
        return self._level > 0 or self._world.size("tp") > 1

    @property
    def is_part(self) -> bool:
        """Whether a rank holds less than the model: slices, or the parameters of some stages."""
        return self.cuts_tensors or self._world.size("pp") > 1

    def read_by(self, stages: Sequence[StageGraph]) -> LocalState:
        """The same tensors as another program of the model reads them, which `stages` are: parameters that none of
        these read are left out. Not to be gathered or loaded.

        Raises SpecError, on every rank alike, for a parameter that has to lie elsewhere, or is not trained so far.
        """
        known = {s.name: s for stage in self._stages for s in stage.parameters.values()}
        for stage in stages:
            for shard in stage.parameters.values():
                self._check_home(shard, known.get(shard.name), stage.index % self._world.size("pp"))
        other = copy.copy(self)
        other.own_stages = tuple(stages[self._world.position["pp"] :: self._world.size("pp")])
        own, read = _shards(other.own_stages), {s.name for stage in stages for s in stage.parameters.values()}
        # A tied weight follows its copies also where this rank does not read it.
        other.shards = {n: own.get(n, replace(s, grad_partial=())) for n, s in self.shards.items() if n in read}
        other.parameters = {n: self.parameters[n] for n in other.shards}
        other._order = [n for n in self._order if n in other.parameters]
        return other

    def _check_home(self, shard: ParameterShard, known: ParameterShard | None, rank: int) -> None:
        if known is None and not shard.requires_grad:
            return  # whole on every rank, as a buffer
        if known is None or rank not in self.holders(shard.name) or shard.placement != known.placement:
            raise SpecError(
                f"{shard.name} is trained by this call, and was not read "
                + ("before" if known is None else f"before in the same place (stage rank {rank}, {shard.placement})"),
                where="parameters",
                try_="an example for parallelize that reads it",
            )

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """In the order of the user's model."""
        return [(name, self.parameters[name]) for name in self._order]

    def tensors_of(self, stage: StageGraph) -> dict[str, Tensor]:
        """Attribute path in the stage's graph -> this rank's tensor, in the dtype it computes in."""
        tensors = {path: self._local(shard) for path, shard in stage.parameters.items()}
        return tensors | {path: self.buffers[self._canonical[name]] for path, name in stage.buffers.items()}

    def _local(self, shard: ParameterShard) -> Tensor:
        name = shard.name
        if name in self.parameters:
            return self.copies.of.get(name, self.parameters[name])
        position, tp = self._world.position["tp"], self._world.size("tp")  # read in evaluation alone
        return local_slice(self.buffers[name], shard.placement, position, tp) if tp > 1 else self.buffers[name]

    def holders(self, name: str) -> list[int]:
        """Positions on pp that hold a parameter."""
        ranks = self._world.size("pp")
        held = (s.index % ranks for s in self._stages if any(p.name == name for p in s.parameters.values()))
        return sorted(set(held))

    def divides(self, name: str) -> bool:
        """Whether the plan's ZeRO level shards a parameter over the data ranks.

        Not one whose gradient is no summand on each of them, nor a frozen one below level 3: it has nothing to save.
        Nor a single number, which has no dim to cut.
        """
        shard, world = self.shards[name], self._world
        if not self.parameters[name].dim():
            return False
        if not shard.requires_grad:
            return self._level == 3
        return self._level > 0 and (world.size("cp") == 1 or "cp" in shard.grad_partial)

    def counts_here(self, name: str) -> bool:
        """Whether this rank's part of a parameter is the one of its equal copies that global sums count."""
        position, shard = self._world.position, self.shards[name]
        first = {axis: position[axis] == 0 for axis in ("dp", "cp", "tp")}
        parameter = self.parameters[name]
        copies = copies_group(parameter)
        data = copies is None or copies.rank() == 0
        if not isinstance(parameter, DTensor):
            data = first["dp"] and first["cp"]
        return data and (first["tp"] or shard.placement.is_shard) and self.holders(name)[0] == position["pp"]

    def gather(self, local: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Whole tensors on every rank, of values that lie like this rank's parameters (same names). Collective."""
        whole: dict[str, Tensor | None] = {}
        world = self._world
        for stage in self._stages:
            shards = {s.name: s for s in stage.parameters.values() if s.name not in whole}
            home = stage.index % world.size("pp")
            mine = home == world.position["pp"]
            held = [int(mine and local[name] is not None) for name in shards]
            present = torch.tensor(held, dtype=torch.int32, device=world.device)
            world.broadcast(present, "pp", home)
            for (name, shard), there in zip(shards.items(), present.tolist(), strict=True):
                value = local[name] if mine else None
                whole[name] = self._gather_one(value, shard, home) if there else None
        return whole

    def state_dict(self) -> dict[str, Tensor]:
        """Whole tensors under the keys, and in the order, of the user's own state_dict. Collective."""
        gathered = self.gather({name: p.detach() for name, p in self.parameters.items()})
        whole = {**self.buffers, **{name: value for name, value in gathered.items() if value is not None}}
        return {key: whole[self._canonical[key]].detach() for key in self._keys if key in self._canonical}

    def load(self, state: Mapping[str, Tensor], strict: bool = True) -> _IncompatibleKeys:
        """Take this rank's slices out of whole tensors; a tied one may be given under any of its names.

        Returns what is missing and what is unknown. Raises AutoparError, before anything is changed and on every rank
        alike, if there is any of that and `strict`, for a misshapen tensor, and for one that differs between ranks.
        Collective.
        """
        shapes: dict[str, tuple[int, ...]] = {name: tuple(buffer.shape) for name, buffer in self.buffers.items()}
        shapes |= {s.name: tuple(s.shape) for stage in self._stages for s in stage.parameters.values()}
        keys = {key: self._canonical[key] for key in self._keys if key in self._canonical}
        unlike = check_loadable(state, keys, shapes, strict, self._world)
        tp, index = self._world.size("tp"), self._world.position["tp"]
        with torch.no_grad():
            for key, name in keys.items():
                if key not in state:
                    continue
                value = state[key]
                shard = self.shards.get(name)
                target = self.parameters[name] if shard is not None else self.buffers.get(name)
                if target is not None:  # else it is on another stage
                    copy_whole(target, value if shard is None else _slice(value, shard, index, tp))
        return unlike

    def differing_copies(self) -> list[str]:
        """Names of this stage's parameters whose dp or tp copies are not the same to the bit. Collective."""
        differing = []
        for name, shard in self.shards.items():
            parameter = self.parameters[name]
            own = local_part(parameter.detach())
            different = torch.zeros((), dtype=torch.int32, device=self._world.device)
            axes = () if isinstance(parameter, DTensor) else ("dp", "cp")
            copied = [self._world.group(a) for a in (axes if shard.placement.is_shard else (*axes, "tp"))]
            for group in (*copied, copies_group(parameter)):
                if group is not None:
                    first = own.clone(memory_format=torch.contiguous_format)
                    dist.broadcast(first, group=group, group_src=0)
                    different = different | (first != own).any().to(torch.int32)
            for axis in ("dp", "cp", "tp"):
                different = self._world.sum(different, axis)
            if different.item():
                differing.append(name)
        return differing

    def _place(self, whole: Tensor, shard: ParameterShard) -> nn.Parameter:
        world = self._world
        if world.alone:
            assert isinstance(whole, nn.Parameter)
            if whole.device != world.device:
                whole.data = whole.data.to(world.device)
            return whole
        piece = _slice(whole.detach(), shard, world.position["tp"], world.size("tp"))
        copied = piece.to(world.device, copy=True).contiguous()
        return nn.Parameter(copied, requires_grad=shard.requires_grad)

    def _gather_one(self, value: Tensor | None, shard: ParameterShard, stage: int) -> Tensor:
        world, group = self._world, self._world.group("tp")
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if value is None:
            whole = torch.empty(shard.shape, dtype=shard.dtype, device=world.device)
        elif group is not None and shard.placement.is_shard:
            value = value.detach().contiguous()
            parts = [torch.empty_like(value) for _ in range(group.size())]
            dist.all_gather(parts, value, group=group)
            dim = shard.placement.dim
            whole = join_shards(torch.stack(parts), shard.placement).narrow(dim, 0, shard.shape[dim]).contiguous()
        else:
            whole = value.detach().clone()
        world.broadcast(whole, "pp", stage)
        return whole

    def _same_as_rank_zero(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compare by checksum, and take over from rank 0 the tensors that differ anywhere."""
        device = self._world.device
        sums = torch.stack([checksum(t) for t in whole.values()]).to(device)
        first = sums.clone()
        dist.broadcast(first, 0)
        differs = (sums != first).to(torch.int32)
        dist.all_reduce(differs, dist.ReduceOp.MAX)
        names = [name for name, d in zip(whole, differs.tolist(), strict=True) if d]
        same = dict(whole)
        for name in names:
            received = whole[name].detach().to(device, copy=True).contiguous()
            dist.broadcast(received, 0)
            same[name] = received
        if names:
            self.notices.append(
                f"{len(names)} of {len(whole)} tensors differed between ranks (another seed?), {names[0]} among them; "
                "all ranks took those of rank 0"
            )
        return same


def _slice(whole: Tensor, shard: ParameterShard, index: int, ranks: int) -> Tensor:
    return local_slice(filled_up(whole, shard.placement, ranks), shard.placement, index, ranks)


def _shards(stages: Sequence[StageGraph]) -> dict[str, ParameterShard]:
    """By name; where a gradient is partial for one reader of a parameter, it is partial."""
    shards: dict[str, ParameterShard] = {}
    for stage in stages:
        for shard in stage.parameters.values():
            known = shards.get(shard.name, shard)
            partial = tuple(dict.fromkeys((*known.grad_partial, *shard.grad_partial)))
            shards[shard.name] = replace(shard, grad_partial=partial)
    return shards


def _canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Every name -> the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def _computed_buffers(stages: Sequence[StageGraph]) -> dict[str, Tensor]:
    """Buffers whose values capture recomputed, because the model was built on the meta device."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        for path, name in stage.buffers.items():
            owner, _, attribute = path.rpartition(".")
            found[name] = getattr(stage.graph_module.get_submodule(owner), attribute)
    return found


def _refuse_meta(tensors: Mapping[str, Tensor]) -> None:
    meta = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if meta is not None:
        raise AutoparError(
            "this buffer is on the meta device, and nothing recomputes its value",
            where=meta,
            try_="build the model on the CPU, or load the buffer",
        )
