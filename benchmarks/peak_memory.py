"""Peak memory of every rank, tracked on the CPU while it trains, beside what the plan predicts; for eight layouts.

    python benchmarks/peak_memory.py [--json]

A small Llama on four local processes. What tensors hold is counted by storage, from the op that makes it to its last
reference (`autopar.dryrun.recorder`); storages that FSDP empties count as empty. Parameters, gradients, AdamW state and
activations are in it, the device's reserve is in neither. The largest moment of two steps with the optimizer's is what
counts. --json tells categories: what FSDP gathers is communication, gradients it has not reduced yet are activations.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.api import find_plan
from autopar.build import build
from autopar.dryrun.recorder import Recorder
from autopar.ir import TracedModel
from autopar.passes import prepare
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.sharding import local_part
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace

RANKS, ROWS, SEQ = 4, 8, 128
LAYOUTS = (
    "dp=4 zero=0 checkpoint=none",
    "dp=4 zero=1 checkpoint=none",
    "dp=4 zero=3 checkpoint=none",
    "dp=4 zero=0 checkpoint=full",
    "tp=4 sp=true checkpoint=none",
    "pp=4 schedule=1f1b checkpoint=none",
    "dp=2 tp=2 sp=true zero=0 checkpoint=selective",
    "dp=2 cp=2 zero=0 checkpoint=none",
)


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=688, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=SEQ, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 2048, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def _measure(plans: list[Plan]) -> list[dict[str, int]]:
    """Per layout, bytes by category at the peak of this rank."""
    torch.set_num_threads(1)
    traced = prepare(trace(_model(), _batch()))
    return [_one_layout(traced, plan) for plan in plans]


def _one_layout(traced: TracedModel, plan: Plan) -> dict[str, int]:
    pm = build(_model(), traced, plan)
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-4)
    recorder = Recorder()

    def on_gradient(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            recorder.claim(local_part(parameter.grad), "gradients")

    for parameter in pm.parameters():
        recorder.claim(parameter, "parameters")
        if not isinstance(parameter, DTensor):  # FSDP computes with others in their place
            parameter.register_post_accumulate_grad_hook(on_gradient)
    with recorder:
        for _ in range(2):
            pm.step(_batch())
            with recorder.category("optimizer"):
                optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    return recorder.peak


def _plans() -> list[Plan]:
    cluster, train = ClusterSpec.parse(f"local:{RANKS}"), TrainSpec(global_batch=ROWS, seq_len=SEQ)
    pins = [Pins.parse([*text.split(), "microbatch=1"]) for text in LAYOUTS]
    return [find_plan(_model(), cluster, train, example=_batch(), pins=p).plan for p in pins]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    plans = _plans()
    by_rank = run_ranks(RANKS, _measure, plans, timeout_s=900)
    rows = []
    for i, (name, plan) in enumerate(zip(LAYOUTS, plans, strict=True)):
        stages = plan.prediction["peak_memory_bytes"]
        for rank in range(RANKS):
            predicted = stages[plan.degrees.coordinates(rank)["pp"]]
            expected = predicted["total"] - predicted.get("reserved", 0)
            held = by_rank[rank][i]
            rows.append({"layout": name, "rank": rank, "measured": sum(held.values()), "predicted": int(expected),
                         "measured_by_category": held, "predicted_by_category": predicted})  # fmt: skip
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'layout':36} {'rank':>4} {'measured':>10} {'predicted':>10}  off")
    for row in rows:
        off = row["measured"] / row["predicted"] - 1
        sizes = f"{row['measured'] / 2**20:8.2f}Mi {row['predicted'] / 2**20:8.2f}Mi"
        print(f"{row['layout']:36} {row['rank']:>4} {sizes} {off:+6.1%}")
    worst = max(abs(row["measured"] / row["predicted"] - 1) for row in rows)
    print(f"largest difference {worst:.1%} over {len(LAYOUTS)} layouts, {RANKS} ranks each")


if __name__ == "__main__":
    main()
