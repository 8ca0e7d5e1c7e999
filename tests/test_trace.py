"""Capture: the graph is the model, at other sizes than captured, and the model is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_model.search import search
from autopar.errors import SpecError, UnsupportedModelError
from autopar.passes import prepare
from autopar.specs import ClusterSpec, Pins, TrainSpec
from autopar.trace import trace
from tests.models import BUILDERS, default_batch


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _loss(output: Any) -> Tensor:
    loss = output if isinstance(output, Tensor) else output.loss
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.parametrize("family", list(BUILDERS))
@pytest.mark.parametrize("prepared", [False, True], ids=["captured", "prepared"])
def test_graph_is_the_model_at_another_size(family: str, prepared: bool) -> None:
    model = BUILDERS[family]()
    before = _state(model)
    config = repr(getattr(model, "config", None))
    traced = trace(model, default_batch())
    traced = prepare(traced) if prepared else traced
    batch = default_batch(rows=3, seq=11, seed=5)
    call = batch | ({"use_cache": False} if hasattr(model, "config") else {})
    wanted = _gradients(model, _loss(model(**call)))
    reference = _loss(model(**call)).detach()
    outputs = traced.graph_module(*traced.signature.bind((), batch).values())
    assert traced.loss is not None
    loss = outputs[traced.loss]
    assert torch.equal(loss.detach(), reference)
    found = _gradients(model, loss)
    assert found.keys() == wanted.keys()
    # Where transformers leaves grouped heads to the attention kernel, but repeats them under a tracer, the order in
    # which a processor's kernel adds up the shared heads' gradients is its own: the last bit of fp64.
    shared_heads = getattr(model, "config", None) and model.config.to_dict().get("num_key_value_heads")
    for n, gradient in wanted.items():
        last_bit = 4 * torch.finfo(gradient.dtype).eps * gradient.abs().max().item() if shared_heads else 0.0
        torch.testing.assert_close(found[n], gradient, rtol=0.0, atol=last_bit)
    assert repr(getattr(model, "config", None)) == config
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "tiny_gpt"])
def test_meta_model_gives_the_same_graph(family: str) -> None:
    real = trace(BUILDERS[family](), default_batch())
    with torch.device("meta"):
        meta = trace(BUILDERS[family](), default_batch())
    assert meta.fingerprint == real.fingerprint
    assert meta.unknown_buffers == ()


def test_buffer_nobody_can_recompute_is_named() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * self.scale).mean()

    with torch.device("meta"):
        model = Scaled()
    assert trace(model, {"x": torch.zeros(4, 4)}).unknown_buffers == ("scale",)


def test_ops_without_a_rule_are_said() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([_Pair(), _Pair()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.mean()

    class _Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(self.a(x)).sort(-1).values
            return y

    (notice,) = prepare(trace(Stack(), {"x": torch.zeros(4, 4)})).notices
    assert notice.startswith("sort (2 in the layers) has no sharding rule")


def test_layers_are_found_and_share_a_class() -> None:
    traced = prepare(trace(BUILDERS["llama"](), default_batch()))
    assert [s.path for s in traced.layers] == [f"model.layers.{i}" for i in range(4)]
    assert len({s.class_id for s in traced.layers}) == 1
    assert [s.kind for s in traced.segments] == ["glue", *["layer"] * 4, "glue"]


def test_encoder_decoder_has_two_stacks_with_glue_between() -> None:
    traced = prepare(trace(BUILDERS["t5"](), default_batch()))
    assert [s.path for s in traced.segments] == [
        "prologue", "encoder.block.0", "encoder.block.1", "before decoder.block", "decoder.block.0", "decoder.block.1",
        "epilogue",
    ]  # fmt: skip


def test_ties_are_found_by_identity() -> None:
    traced = trace(BUILDERS["bert"](), default_batch())
    assert traced.ties == {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    assert traced.parameter_count == 39584


@dataclass
class Packed:
    ids: Tensor
    extra: Tensor


class Doubler(nn.Module):
    """Takes its inputs in every form; `scale` is a constant of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor | None = None, scale: int = 2, packed: Packed | None = None) -> Packed:
        x = x if packed is None else packed.ids + packed.extra
        return Packed(ids=self.linear(x) * scale, extra=x if y is None else y)


def test_positional_keyword_and_dataclass_arguments_bind_by_name() -> None:
    model, x, y = Doubler(), torch.rand(3, 4), torch.rand(3, 4)
    traced = trace(model, (x, y))
    assert traced.outputs == ("ids", "extra")
    for args, kwargs in (((x, y), {}), ((x,), {"y": y}), ((), {"y": y, "x": x})):
        out = traced.out_spec.unflatten(list(traced.graph_module(*traced.signature.bind(args, kwargs).values())))
        assert isinstance(out, Packed)
        assert torch.equal(out.ids, model(x, y).ids)
        assert torch.equal(out.extra, y)


def test_dataclass_input_is_transparent() -> None:
    model = Doubler()
    packed = Packed(torch.rand(3, 4), torch.rand(3, 4))
    traced = trace(model, {"x": torch.rand(3, 4), "packed": packed})
    call = {"x": torch.rand(3, 4), "packed": Packed(torch.rand(5, 4), torch.rand(5, 4))}
    outputs = traced.graph_module(*traced.signature.bind((), call).values())
    assert torch.equal(outputs[0], model(**call).ids)


def test_changed_constant_or_tensors_are_refused() -> None:
    traced = trace(Doubler(), {"x": torch.rand(3, 4), "scale": 3})
    with pytest.raises(SpecError, match="captured as 3 and is now 4"):
        traced.signature.bind((), {"x": torch.rand(2, 4), "scale": 4})
    with pytest.raises(SpecError, match="missing: x"):
        traced.signature.bind((), {"scale": 3})
    with pytest.raises(SpecError, match="not captured: y"):
        traced.signature.bind((), {"x": torch.rand(2, 4), "y": torch.rand(2, 4), "scale": 3})


def test_loss_function_outside_the_model_is_captured_with_it() -> None:
    model = BUILDERS["tiny_gpt"]()
    batch = default_batch()

    def loss_fn(logits: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten())

    example = {"input_ids": batch["input_ids"], "target": batch["labels"]}
    traced = trace(model, example, loss_fn=loss_fn)
    assert traced.loss is not None
    outputs = traced.graph_module(*traced.signature.bind((), example).values())
    assert torch.equal(outputs[traced.loss], loss_fn(model(batch["input_ids"]), example))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Linear(), _Branch()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class _Branch(_Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.abs().mean() > 1:
            x = x / 2
        return super().forward(x)


def test_control_flow_on_values_names_the_module_and_line() -> None:
    message = r"blocks\.1: .*depends on tensor values.*test_trace\.py:\d+"
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        trace(Branching(), {"x": torch.zeros(4, 4)})
    assert "torch.where" in caught.value.try_


def test_autocast_region_is_refused() -> None:
    class Autocast(_Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).mean()

    with pytest.raises(UnsupportedModelError, match="wrap_with_autocast"):
        trace(Autocast(), {"x": torch.zeros(4, 4)})


def test_fixed_batch_size_is_refused() -> None:
    class Fixed(_Linear):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.offset).mean()

    with pytest.raises(UnsupportedModelError, match="input x: forward works for batch size 6 only"):
        trace(Fixed(), {"x": torch.zeros(6, 4)})


def test_example_without_tensors_is_refused() -> None:
    with pytest.raises(SpecError, match="no tensor"):
        trace(Doubler(), {"scale": 3})


def test_a_length_that_forward_unrolls_is_the_only_one() -> None:
    class Unrolled(_Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            states = [super(Unrolled, self).forward(x[:, i]) for i in range(x.shape[1])]
            return torch.stack(states).mean() + y.mean()

    traced = trace(Unrolled(), {"x": torch.zeros(2, 5, 4), "y": torch.zeros(2, 5)})
    assert traced.seq_range == (5, 5)


def test_sequence_limit_of_learned_positions_is_kept() -> None:
    assert trace(BUILDERS["bert"](), default_batch()).seq_range == (1, 64)


class Returning(nn.Module):
    """Two linear layers; returns what `outputs` makes of the loss and of a penalty."""

    def __init__(self, outputs: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.outputs = outputs

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.outputs(F.mse_loss(x, y), self.layers[0].weight.pow(2).mean())


@pytest.mark.parametrize(
    ("outputs", "loss"),
    [
        (lambda loss, penalty: {"aux": {"loss": penalty}, "loss": loss}, "loss"),
        (lambda loss, penalty: {"penalty": penalty, "loss": loss}, "loss"),
        (lambda loss, penalty: (loss.detach() * 2, loss), "1"),
        (lambda loss, penalty: {"total": loss, "accuracy": penalty.detach()}, "total"),
    ],
)
def test_the_loss_is_the_output_named_so_or_the_one_that_learns(outputs: Any, loss: str) -> None:
    traced = trace(Returning(outputs), {"x": torch.rand(4, 8), "y": torch.rand(4, 8)})
    assert traced.loss is not None
    assert traced.outputs[traced.loss].split(".")[-1] == loss
    assert traced.outputs[traced.loss].count(".") <= 1


def test_several_losses_have_to_be_told_apart() -> None:
    model = Returning(lambda loss, penalty: {"ce": loss, "penalty": penalty, "total": loss + penalty})
    with pytest.raises(UnsupportedModelError, match="several outputs might be the loss: .*ce.*total"):
        trace(model, {"x": torch.rand(4, 8), "y": torch.rand(4, 8)})


def test_a_written_slice_carries_gradient() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                y = layer(x).clone()
                y[..., 2:] = x[..., :1]
                y[:, 0].copy_(x[:, 0] * 2)
                x = y
            return x.pow(2).mean()

    model, batch = Written(), {"x": torch.rand(4, 8)}
    wanted = _gradients(model, model(**batch))
    traced = prepare(trace(model, batch))
    assert traced.loss is not None
    found = _gradients(model, traced.graph_module(**batch)[traced.loss])
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_sizes_that_are_divided_can_be_priced() -> None:
    class Blockwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                rows, length, width = x.shape
                x = layer(x.view(rows, length // 4, 4, width)).reshape(rows, length // 4 * 4, width)
                x = F.pad(x, (0, 0, 0, -x.shape[1] % 8))[:, :length]
            return x.pow(2).mean()

    traced = prepare(trace(Blockwise(), {"x": torch.rand(4, 16, 8)}))
    result = search(traced, ClusterSpec.parse("local:2"), TrainSpec(global_batch=4, seq_len=16), Pins(dp=2))
    assert result.plan.degrees.dp == 2
