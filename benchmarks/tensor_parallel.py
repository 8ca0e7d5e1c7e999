"""Step time of the rewritten tp=2 graph against torch's own parallelize_module, on the same model, kernel and ranks.

Two gloo processes on this machine; rounds of both are interleaved in one run, and the medians' ratio is what counts
(targets: 0.85, and 0.95 with sequence sharding). Collectives and their bytes are counted on both sides. Run by
rewrite_overhead.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.build import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.trace import trace

HIDDEN, HEADS, SEQ, LAYERS, VOCAB, ROWS = 512, 8, 256, 4, 1024, 2


class _Collectives(TorchDispatchMode):
    """Counts collectives and the bytes of the tensors that go in, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not any(w in func.__name__ for w in ("wait", "barrier")):
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            self.number += 1
            self.bytes += max((t.numel() * t.element_size() for t in tensors), default=0)
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, -1, HIDDEN // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).reshape(b, s, -1))
        return out


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Decoder(nn.Module):
    """Blocks between a replicated embedding and head, so that both sides cut the same things."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def new_model() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def new_batch(rows: int = ROWS, seq: int = SEQ) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (rows, seq), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def _rewritten(sequence_sharding: bool) -> tuple[Callable[[], Tensor], nn.Module]:
    model, batch = new_model(), new_batch()
    names = {**dict.fromkeys(("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), "S(0)")}
    names |= dict.fromkeys(("attention.o", "mlp.down"), "S(1)")
    plan = Plan(
        degrees=Degrees(tp=2),
        global_batch=ROWS,
        seq_len=SEQ,
        micro_batch=ROWS,
        stages=((f"blocks.0-{LAYERS - 1}",),),
        parameters={f"blocks.*.{name}.weight": placement for name, placement in names.items()},
        sequence_sharding=sequence_sharding,
    )
    pm = build(model, prepare(trace(model, batch)), plan)
    return lambda: pm.step(batch), pm


def _by_dtensor(sequence_sharding: bool) -> tuple[Callable[[], Tensor], nn.Module]:
    model, batch = new_model(), new_batch()
    mesh = init_device_mesh("cpu", (2,))
    columns = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")}
    rows = {
        name: RowwiseParallel(output_layouts=Shard(1)) if sequence_sharding else RowwiseParallel()
        for name in ("attention.o", "mlp.down")
    }
    for block in model.blocks:
        layout: dict[str, Any] = {**columns, **rows}
        if sequence_sharding:
            gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            layout |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
            layout |= {"attention": PrepareModuleInput(**gather), "mlp": PrepareModuleInput(**gather)}
        parallelize_module(block, mesh, layout)
    if sequence_sharding:
        whole = {"use_local_output": True, "output_layouts": Shard(1), "input_layouts": Replicate()}
        parallelize_module(model, mesh, {"embed": RowwiseParallel(**whole)})
        parallelize_module(model, mesh, {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})

    def step() -> Tensor:
        loss: Tensor = model(**batch)
        loss.backward()
        return loss.detach()

    return step, model


def _measure(rounds: int, sequence_sharding: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    sides = {"rewritten": _rewritten(sequence_sharding), "parallelize_module": _by_dtensor(sequence_sharding)}
    result: dict[str, Any] = {name: {"times": [], "processor": []} for name in sides}
    for name, (step, module) in sides.items():
        for _ in range(2):
            result[name]["loss"] = step().item()
            module.zero_grad(set_to_none=True)
        with _Collectives() as counted:
            step()
        module.zero_grad(set_to_none=True)
        result[name] |= {"collectives": counted.number, "bytes": counted.bytes}
    for turn in range(rounds):
        for name, (step, module) in list(sides.items())[:: 1 if turn % 2 == 0 else -1]:
            dist.barrier()
            start, started = time.perf_counter(), time.process_time()
            step()
            result[name]["times"].append(time.perf_counter() - start)
            result[name]["processor"].append(time.process_time() - started)
            module.zero_grad(set_to_none=True)
    return result


def compare(rounds: int) -> dict[str, dict[str, Any]]:
    """By layout: medians in seconds, their ratio, and that of the processor time of a rank; [rewritten,
    parallelize_module] collectives and megabytes of a step; the difference of the first losses."""
    table = {}
    for sequence_sharding in (False, True):
        first = run_ranks(2, _measure, rounds, sequence_sharding, timeout_s=600)[0]
        medians = {name: statistics.median(side["times"]) for name, side in first.items()}
        spent = {name: statistics.median(side["processor"]) for name, side in first.items()}
        table["tp=2, sequence sharding" if sequence_sharding else "tp=2"] = {
            "rewritten_s": medians["rewritten"],
            "parallelize_module_s": medians["parallelize_module"],
            "ratio": medians["rewritten"] / medians["parallelize_module"],
            "processor_ratio": spent["rewritten"] / spent["parallelize_module"],
            "collectives": [first[name]["collectives"] for name in medians],
            "megabytes": [first[name]["bytes"] / 1e6 for name in medians],
            "loss_difference": abs(first["rewritten"]["loss"] - first["parallelize_module"]["loss"]),
        }
    return table
