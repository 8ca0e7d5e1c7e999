"""Plans as an engineer writes them by hand: Megatron's layout for the shared test models."""

from __future__ import annotations

import itertools

from autopar.cost_model.search import search
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.plan import Plan
from autopar.specs import ClusterSpec, Pins, TrainSpec

_LLAMA = {
    "model.embed_tokens.weight": "S(0)",
    "lm_head.weight": "S(0)",
    **{f"model.layers.*.self_attn.{name}_proj.weight": "S(0)" for name in "qkv"},
    "model.layers.*.self_attn.o_proj.weight": "S(1)",
    "model.layers.*.mlp.gate_proj.weight": "S(0)",
    "model.layers.*.mlp.up_proj.weight": "S(0)",
    "model.layers.*.mlp.down_proj.weight": "S(1)",
}
_QWEN2 = {  # biases on q, k and v, and a tied head
    **{name: placement for name, placement in _LLAMA.items() if name != "lm_head.weight"},
    **{f"model.layers.*.self_attn.{name}_proj.bias": "S(0)" for name in "qkv"},
}
_TINY_GPT = {
    "tokens.weight": "S(0)",
    "blocks.*.attention.qkv.weight": "S(0,left=3)",
    "blocks.*.attention.qkv.bias": "S(0,left=3)",
    "blocks.*.attention.out.weight": "S(1)",
    "blocks.*.mlp.0.weight": "S(0)",
    "blocks.*.mlp.0.bias": "S(0)",
    "blocks.*.mlp.2.weight": "S(1)",
}
_GPT2 = {  # Conv1D holds its weight transposed
    "transformer.wte.weight": "S(0)",
    "transformer.h.*.attn.c_attn.weight": "S(1,left=3)",
    "transformer.h.*.attn.c_attn.bias": "S(0,left=3)",
    "transformer.h.*.attn.c_proj.weight": "S(0)",
    "transformer.h.*.mlp.c_fc.weight": "S(1)",
    "transformer.h.*.mlp.c_fc.bias": "S(0)",
    "transformer.h.*.mlp.c_proj.weight": "S(0)",
}

_LAYOUTS = {
    "llama": ("model.layers", _LLAMA),
    "qwen2": ("model.layers", _QWEN2),
    "qwen3": ("model.layers", _LLAMA),
    "mistral": ("model.layers", _LLAMA),
    "tiny_gpt": ("blocks", _TINY_GPT),
    "gpt2": ("transformer.h", _GPT2),
}


def megatron(
    model: str,
    degrees: Degrees,
    *,
    sequence_sharding: bool = True,
    checkpoint: bool = False,
    micro_batch: int = 1,
    schedule: str = "1f1b",
    layers: int = 4,
    precision: str = "fp64",
    virtual_stages: int = 1,
) -> Plan:
    """Column and row parallel projections, sharded vocabulary, equal stages; 8 sequences of 16 tokens a step."""
    path, parameters = _LAYOUTS[model]
    stages = degrees.pp * virtual_stages
    cuts = [round(i * layers / stages) for i in range(stages + 1)]
    return Plan(
        degrees=degrees,
        global_batch=8,
        seq_len=16,
        micro_batch=micro_batch,
        stages=tuple(tuple(f"{path}.{i}" for i in range(a, b)) for a, b in itertools.pairwise(cuts)),
        schedule=schedule,
        virtual_stages=virtual_stages,
        sequence_sharding=sequence_sharding and degrees.tp > 1,
        parameters=parameters if degrees.tp > 1 else {},
        checkpoint={f"{path}.*": "full"} if checkpoint else {},
        precision=precision,
    )


def on_every_axis(traced: TracedModel, precision: str = "fp64") -> list[Plan]:
    """Two ranks on each axis: tensor parallel as the search lays it out, without and with sequence sharding, then
    pipeline, context and data parallel, in micro-batches of two rows; 8 sequences of 16 tokens."""
    layers = tuple(s.path for s in traced.layers)
    half = len(layers) // 2
    train, cluster = TrainSpec(global_batch=8, seq_len=16, precision=precision), ClusterSpec.parse("local:2")
    plans = [search(traced, cluster, train, Pins(tp=2, sp=sp)).plan for sp in (False, True)]
    cuts = {Degrees(pp=2): (layers[:half], layers[half:]), Degrees(cp=2): (layers,), Degrees(dp=2): (layers,)}
    for degrees, stages in cuts.items():
        if not all(stages):
            continue  # one layer is one stage
        plans.append(
            Plan(degrees=degrees, global_batch=8, seq_len=16, micro_batch=2, stages=stages, precision=precision)
        )
    return plans
