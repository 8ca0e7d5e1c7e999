"""Trains a small Llama on the sources of the Python standard library, planned and run on 4 local processes.

    python examples/train_llama.py                             # the demo: one process, then 4, then compared
    python examples/train_llama.py --pin tp=2 --pin pp=2       # the same with choices fixed
    torchrun --nproc-per-node 4 examples/train_llama.py        # the 4 processes alone

Everything autopar needs is in `train_parallel`; the rest is the model, the data and the comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

RANKS, STEPS = 4, 100
GLOBAL_BATCH, SEQ_LEN = 16, 128
LEARNING_RATE = 1e-3


def build_model() -> nn.Module:
    """A Llama over bytes, 0.9 million parameters; the same weights on every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SEQ_LEN,
    )
    return LlamaForCausalLM(config)


def batches() -> Iterator[dict[str, Tensor]]:
    """The same STEPS global batches on every process: random windows of the standard library's text."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - SEQ_LEN, (GLOBAL_BATCH,), generator=generator).tolist()
        ids = torch.stack([text[start : start + SEQ_LEN] for start in starts]).long()
        yield {"input_ids": ids, "labels": ids.clone()}


def train_parallel(pins: list[str]) -> list[float]:
    """One of RANKS processes. Returns the loss of every step, the same on all of them."""
    cluster = autopar.ClusterSpec.preset("local", nodes=RANKS)
    pm = autopar.parallelize(
        build_model(),
        cluster,
        train=autopar.TrainSpec(global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN),
        pins=autopar.Pins.parse(pins),
    )
    first = torch.distributed.get_rank() == 0
    if first:
        print(pm.report(), flush=True)
        pm.plan.save("plan.json")

    optimizer = pm.optimizer(torch.optim.AdamW, lr=LEARNING_RATE)
    losses = []
    for step, batch in enumerate(batches()):
        loss = pm.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if first and (step % 10 == 0 or step == STEPS - 1):
            print(f"step {step:3d}  loss {losses[-1]:.4f}", flush=True)
    return losses


def train_in_one_process() -> list[float]:
    """The same training in plain PyTorch, the reference."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def start_ranks(pins: list[str], losses_file: Path) -> None:
    """torchrun with this file; raises CalledProcessError if a rank fails."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    arguments = [__file__, f"--losses={losses_file}", *(f"--pin={pin}" for pin in pins)]
    subprocess.run([*torchrun, *arguments], check=True, timeout=600, env={"OMP_NUM_THREADS": "1", **os.environ})


def main() -> None:
    parser = argparse.ArgumentParser(description="train a small Llama on 4 local processes")
    parser.add_argument("--pin", action="append", default=[], help="fix a choice of the plan, as in tp=2")
    parser.add_argument("--losses", type=Path, help="where the ranks leave their losses (JSON)")
    options = parser.parse_args()

    if "RANK" in os.environ:  # started by torchrun
        losses = train_parallel(options.pin)
        if options.losses and torch.distributed.get_rank() == 0:
            options.losses.write_text(json.dumps(losses))
        torch.distributed.destroy_process_group()
        return

    start = time.perf_counter()
    print(f"one process, {STEPS} steps of {GLOBAL_BATCH} x {SEQ_LEN} tokens ...", flush=True)
    reference = train_in_one_process()
    print(f"loss {reference[0]:.4f} -> {reference[-1]:.4f} in {time.perf_counter() - start:.1f} s\n", flush=True)

    losses_file = Path("plan.json").with_suffix(".losses.json")
    start = time.perf_counter()
    start_ranks(options.pin, losses_file)
    losses = json.loads(losses_file.read_text())
    losses_file.unlink()
    took_s = time.perf_counter() - start
    print(f"\n{RANKS} processes: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {took_s:.1f} s, start and search included")
    differences = [abs(a - b) / b for a, b in zip(losses, reference, strict=True)]
    print(f"largest relative difference of the loss to one process: {max(differences):.1e} (fp32 rounding, which grows")
    print(
        f"with the steps: {max(differences[: STEPS // 10]):.1e} in the first tenth; `autopar verify` compares in fp64)"
    )
    print("plan written to plan.json")


if __name__ == "__main__":
    main()
