"""The block ILP finds Megatron's layout unaided: column-parallel q/k/v/gate/up, row-parallel o/down, norms on S(1)."""

from __future__ import annotations

import pytest
import torch

from autopar.blocks import op_name
from autopar.cost_model.block_prices import BlockPrices
from autopar.cost_model.comm_cost import group_cost
from autopar.cost_model.compute import Machine
from autopar.cost_model.model_prices import ModelPrices
from autopar.hardware import preset
from autopar.ir import TracedModel
from autopar.mesh import Degrees
from autopar.models import example_from_config
from autopar.passes import prepare
from autopar.trace import trace

transformers = pytest.importorskip("transformers")
SEQ_LEN = 4096


@pytest.fixture(scope="module")
def llama() -> TracedModel:
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    return capture(transformers.LlamaForCausalLM, config)


@pytest.fixture(scope="module")
def gpt2() -> TracedModel:
    config = transformers.GPT2Config(
        vocab_size=51200, n_embd=2048, n_layer=2, n_head=16, n_positions=4096,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return capture(transformers.GPT2LMHeadModel, config)


def capture(model_class: type, config: object) -> TracedModel:
    with torch.device("meta"):
        model = model_class(config)
    model.train()
    return prepare(trace(model, example_from_config(config, 2, 16)))


def layout(traced: TracedModel, tp: int, *, sequence_sharding: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Placement of each weight of the layer, and strategy of each norm and linear, on an 8 x A100 node."""
    cluster = preset("dgx-a100-80g", 1)
    prices = ModelPrices(
        traced, Machine.of(cluster.device, cluster.stack, "bf16"), torch.bfloat16, SEQ_LEN, module_pins={}
    )
    found: BlockPrices = prices.at(tp, 1, sequence_sharding, 1, group_cost(cluster, Degrees(tp=tp, dp=8 // tp), "tp"))
    first = traced.layers[0]
    weights, ops = {}, {}
    for node, (inputs, output) in found.layout.items():
        if node.meta["segment"] != first.index:
            continue
        if node.op == "get_attr":
            weights[str(node.target).removeprefix(first.path + ".")] = str(output)
        elif op_name(node) in ("linear", "rms_norm", "layer_norm", "scaled_dot_product_attention"):
            ops[node.meta["key"].removeprefix(first.path + ".")] = f"{inputs[0]} -> {output}"
    for name, text in (weights | ops).items():
        print(f"tp={tp} {name:60} {text}")
    return weights, ops


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_llama_is_megatron_with_sequence_sharding(llama: TracedModel, tp: int) -> None:
    weights, ops = layout(llama, tp, sequence_sharding=True)
    column = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    assert {f"{name}.weight": "S(0)" for name in column}.items() <= weights.items()
    assert weights["self_attn.o_proj.weight"] == weights["mlp.down_proj.weight"] == "S(1)"
    assert weights["input_layernorm.weight"] == weights["post_attention_layernorm.weight"] == "R"
    strategies = {key.split("::")[0]: text for key, text in ops.items()}
    assert strategies["input_layernorm"] == strategies["post_attention_layernorm"] == "S(1) -> S(1)"
    assert all(strategies[name] == "R|P -> S(2)" for name in column)
    assert strategies["self_attn.o_proj"] == strategies["mlp.down_proj"] == "S(2) -> P"
    assert strategies["self_attn"] == "S(1) -> S(1)"  # attention by heads


def test_llama_is_classic_megatron_without(llama: TracedModel) -> None:
    weights, ops = layout(llama, 4, sequence_sharding=False)
    strategies = {key.split("::")[0]: text for key, text in ops.items()}
    assert weights["self_attn.q_proj.weight"] == "S(0)"
    assert strategies["input_layernorm"] == strategies["post_attention_layernorm"] == "R -> R"
    assert strategies["mlp.down_proj"] == "S(2) -> P"


@pytest.mark.parametrize("tp", [2, 8])
def test_gpt2_shards_its_fused_projection_by_thirds(gpt2: TracedModel, tp: int) -> None:
    weights, ops = layout(gpt2, tp, sequence_sharding=True)
    assert weights["attn.c_attn.weight"] == "S(1,left=3)"  # [in, 3 x hidden]: each third cut by itself
    assert weights["attn.c_attn.bias"] == "S(0,left=3)"
    assert weights["attn.c_proj.weight"] == weights["mlp.c_proj.weight"] == "S(0)"  # rows of a transposed weight
    assert weights["mlp.c_fc.weight"] == "S(1)"
    strategies = {key.split("::")[0]: text for key, text in ops.items()}
    assert strategies["ln_1"] == strategies["ln_2"] == "S(1) -> S(1)"
