"""Tiny models that the tests share, and their batch. Every builder starts from its own seed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir import TracedModel
from autopar.trace import trace

VOCAB, DIM, LAYERS, HEADS, POSITIONS = 64, 32, 4, 4, 64


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = self.qkv(x).split(dim, dim=2)
        q, k, v = (t.view(batch, seq, self.heads, dim // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.drop(self.out(y.transpose(1, 2).reshape(batch, seq, dim)))


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = _Attention(dim, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """A GPT as users write it by hand: fused qkv, learned positions, tied head, loss inside when labels are given."""

    def __init__(
        self, *, vocab: int = VOCAB, dim: int = DIM, layers: int = LAYERS, heads: int = HEADS, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(POSITIONS, dim)
        self.blocks = nn.ModuleList([_Block(dim, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(position)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class EncoderClassifier(nn.Module):
    """nn.TransformerEncoder with a loss: per-token classification of the inputs."""

    def __init__(self, *, vocab: int = VOCAB, dim: int = DIM, layers: int = LAYERS, heads: int = HEADS) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embed(input_ids)))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


_NO_HF_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LLAMA_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}


def _seeded(build: Callable[[], nn.Module], dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build().to(dtype).train()


def tiny_gpt(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    return _seeded(TinyGPT, dtype, seed)


def encoder_classifier(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    return _seeded(EncoderClassifier, dtype, seed)


def gpt2_tiny(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=POSITIONS,
        n_embd=DIM,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _seeded(lambda: GPT2LMHeadModel(config), dtype, seed)


def llama_tiny(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_LLAMA_SIZES, tie_word_embeddings=False)
    return _seeded(lambda: LlamaForCausalLM(config), dtype, seed)


def llama4kv_tiny(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """LLAMA-T with as many key/value heads as heads, so that tp=4 cuts every projection."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**_LLAMA_SIZES, "num_key_value_heads": HEADS}, tie_word_embeddings=False)
    return _seeded(lambda: LlamaForCausalLM(config), dtype, seed)


def qwen2_tiny(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**_LLAMA_SIZES, tie_word_embeddings=True)
    return _seeded(lambda: Qwen2ForCausalLM(config), dtype, seed)


def qwen3_tiny(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**_LLAMA_SIZES, head_dim=8)
    return _seeded(lambda: Qwen3ForCausalLM(config), dtype, seed)


def mistral_tiny(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**_LLAMA_SIZES, sliding_window=8)
    return _seeded(lambda: MistralForCausalLM(config), dtype, seed)


def bert_tiny(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {key: value for key, value in _LLAMA_SIZES.items() if key != "num_key_value_heads"}
    config = BertConfig(**sizes, **_NO_HF_DROPOUT)
    return _seeded(lambda: BertForMaskedLM(config), dtype, seed)


def t5_tiny(dtype: torch.dtype = torch.float64, seed: int = 0, layers: int = 2) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=DIM,
        d_kv=8,
        d_ff=64,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return _seeded(lambda: T5ForConditionalGeneration(config), dtype, seed)


def _hf(model: str, config: str, dtype: torch.dtype, seed: int, **sizes: Any) -> nn.Module:
    import transformers

    settings = getattr(transformers, config)(**sizes)
    return _seeded(lambda: getattr(transformers, model)(settings), dtype, seed)


_PLAIN_SIZES = {key: value for key, value in _LLAMA_SIZES.items() if key != "num_key_value_heads"}


def gemma2_tiny(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Every other layer with a sliding window; soft caps, so attention is written out; norms with a unit offset."""
    return _hf("Gemma2ForCausalLM", "Gemma2Config", dtype, seed, **_LLAMA_SIZES, head_dim=8, sliding_window=8)


def gemma3_tiny(dtype: torch.dtype = torch.float64, seed: int = 0, layers: int = LAYERS) -> nn.Module:
    """Every sixth layer without a sliding window."""
    sizes = {**_LLAMA_SIZES, "num_hidden_layers": layers}
    return _hf("Gemma3ForCausalLM", "Gemma3TextConfig", dtype, seed, **sizes, head_dim=8, sliding_window=8)


def phi_tiny(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Attention and MLP side by side."""
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
    return _hf("PhiForCausalLM", "PhiConfig", dtype, seed, **_PLAIN_SIZES, **no_dropout)


def phi3_tiny(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """q, k and v of unequal sizes in one projection."""
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
    return _hf("Phi3ForCausalLM", "Phi3Config", dtype, seed, **_LLAMA_SIZES, **no_dropout, pad_token_id=0)


def neox_tiny(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Heads fused as (head, q|k|v)."""
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return _hf("GPTNeoXForCausalLM", "GPTNeoXConfig", dtype, seed, **_PLAIN_SIZES, **no_dropout)


def opt_tiny(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    sizes = {key: value for key, value in _PLAIN_SIZES.items() if key != "intermediate_size"}
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}
    return _hf("OPTForCausalLM", "OPTConfig", dtype, seed, **sizes, **no_dropout, ffn_dim=64, word_embed_proj_dim=DIM)


def mixtral_tiny(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Four experts. In fp32: the grouped matrix product has no fp64 kernel."""
    sizes = {**_LLAMA_SIZES, "num_local_experts": 4, "sliding_window": None}
    return _hf("MixtralForCausalLM", "MixtralConfig", dtype, seed, **sizes)


def deepseek_tiny(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Latent attention: values narrower than keys, which are written part by part; one dense layer, one of experts."""
    sizes = {**_LLAMA_SIZES, "num_hidden_layers": 2, "num_key_value_heads": HEADS, "first_k_dense_replace": 1}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    sizes |= {"moe_intermediate_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return _hf("DeepseekV3ForCausalLM", "DeepseekV3Config", dtype, seed, **sizes, **ranks, **experts)


def deberta_tiny(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Attention of joined heads under scores of relative positions, both ways."""
    sizes = {**_PLAIN_SIZES, **_NO_HF_DROPOUT, "num_hidden_layers": 2, "type_vocab_size": 0}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    return _hf("DebertaV2ForMaskedLM", "DebertaV2Config", dtype, seed, **sizes, **relative)


HF_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "gpt2": gpt2_tiny,
    "llama": llama_tiny,
    "qwen2": qwen2_tiny,
    "qwen3": qwen3_tiny,
    "mistral": mistral_tiny,
    "bert": bert_tiny,
    "t5": t5_tiny,
}
MORE_HF_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "gemma2": gemma2_tiny,
    "gemma3": gemma3_tiny,
    "phi": phi_tiny,
    "phi3": phi3_tiny,
    "neox": neox_tiny,
    "opt": opt_tiny,
    "mixtral": mixtral_tiny,
}
OTHER_HF_BUILDERS: dict[str, Callable[..., nn.Module]] = {"deepseek": deepseek_tiny, "deberta": deberta_tiny}
BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "tiny_gpt": tiny_gpt,
    "encoder": encoder_classifier,
    **HF_BUILDERS,
}


def default_batch(rows: int = 8, seq: int = 16, seed: int = 1) -> dict[str, Tensor]:
    """Token ids [rows, seq] in 1..63; the labels are the ids (a separate tensor, so capture keeps two inputs)."""
    ids = torch.randint(1, VOCAB, (rows, seq), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


@functools.cache
def captured(family: str) -> TracedModel:
    """The family captured on the default batch, once for all tests: they only read it."""
    return trace({**BUILDERS, **MORE_HF_BUILDERS}[family](), default_batch())
