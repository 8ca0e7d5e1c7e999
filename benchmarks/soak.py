"""Many steps on four ranks with flat memory: nothing that a step makes is kept.

    python benchmarks/soak.py [--steps 2000] [--layout pipeline]

Resident memory and live tensors of every rank after a tenth of the steps, and at the end. Batches change their length,
so that schedules and buffers are made anew; the monitor writes its records.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.build import build
from autopar.mesh import Degrees
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.trace import trace

LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"degrees": Degrees(dp=2, pp=2), "overlap": ("dp_reduce", "pp_send")},
    "sharded": {"degrees": Degrees(dp=4), "zero": 3, "zero_group": 2},
    "tensor": {"degrees": Degrees(dp=2, tp=2), "overlap": ("dp_reduce", "tp_ring"), "sequence_sharding": True},
}
VOCAB, DIM, ROWS, LAYERS = 64, 32, 8, 4
_SHARDED = {"blocks.*.up.weight": "S(0)", "blocks.*.up.bias": "S(0)", "blocks.*.down.weight": "S(1)"}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList([_Block() for _ in range(LAYERS)])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (ROWS, 16 if step % 7 else 12), generator=torch.Generator().manual_seed(step % 5))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def soak(layout: str, steps: int, path: str) -> dict[str, Any]:
    """On one rank: bytes resident and tensors alive after a tenth of the steps and at the end; first and last loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = dict(LAYOUTS[layout])
    degrees = options.pop("degrees")
    each = LAYERS // degrees.pp
    plan = Plan(
        degrees=degrees, global_batch=ROWS, seq_len=16, micro_batch=1, parameters=_SHARDED if degrees.tp > 1 else {},
        stages=tuple((f"blocks.{i}-{i + each - 1}",) for i in range(0, LAYERS, each)), **options,
    )  # fmt: skip
    model = _Model()
    pm = build(model, prepare(trace(model, _batch(1))), plan)
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-3)
    seen, losses = [], []
    with pm.monitor(path, every=max(1, steps // 20)):
        for step in range(steps):
            loss = pm.step(_batch(step))
            pm.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step == 0 or step == steps - 1:
                losses.append(loss.item())
            if step + 1 in (max(1, steps // 10), steps):
                seen.append(_held())
    return {"held": seen, "losses": losses}


def _held() -> dict[str, int]:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    alive = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return {"resident_bytes": resident, "tensors": len(alive)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--layout", choices=list(LAYOUTS), default="pipeline")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "metrics.jsonl")
        results = run_ranks(4, soak, options.layout, options.steps, path, timeout_s=3600)
    for rank, result in enumerate(results):
        (early, late), (first, last) = result["held"], result["losses"]
        print(
            f"rank {rank}: resident {early['resident_bytes'] / 2**20:.1f} -> {late['resident_bytes'] / 2**20:.1f} MiB, "
            f"tensors {early['tensors']} -> {late['tensors']}, loss {first:.4f} -> {last:.4f}"
        )


if __name__ == "__main__":
    main()
