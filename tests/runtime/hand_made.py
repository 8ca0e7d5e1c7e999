"""A small language model and its stages, rewritten by hand for tp and pp: the engine is tested without any pass.

The model has everything reductions must get right: a tied head (on the last stage, the embedding on the first), column
and row parallel linears with biases, norms whose gradient is partial under sequence sharding, an unused parameter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.ir import ParameterShard, StageGraph, TracedModel
from autopar.mesh import Degrees
from autopar.placement import parse_placement
from autopar.plan import Plan
from autopar.runtime.calls import WholeGraph
from autopar.runtime.collectives import convert
from autopar.runtime.engine import ParallelModule
from autopar.runtime.losses import cross_entropy_sum, vocab_parallel_cross_entropy_sum, vocab_parallel_embedding
from autopar.runtime.programs import Program
from autopar.runtime.recompute import CheckpointedBlock
from autopar.runtime.tokens import over_replicas
from autopar.trace import trace

VOCAB, DIM, LAYERS = 32, 16, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class HandModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def build(seed: int = 0) -> HandModel:
    torch.manual_seed(seed)
    return HandModel().double()


def batch(rows: int = 8, seq: int = 6, seed: int = 1) -> dict[str, Tensor]:
    """Ids and labels with uneven padding: row r keeps its first `1 + r % seq` labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, seq), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, 1 + row % seq :] = -100
    return {"input_ids": ids, "labels": labels}


_LEAVES = (convert, cross_entropy_sum, vocab_parallel_cross_entropy_sum, vocab_parallel_embedding)


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__(autowrap_functions=_LEAVES)

    def is_leaf_module(self, m: nn.Module, qualified_name: str) -> bool:
        return isinstance(m, CheckpointedBlock)


class _LayerGraph(nn.Module):
    """A layer over tp with sequence sharding: x is S(1)."""

    def __init__(self, layer: Layer, tp: int) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.tp = layer.norm, layer.up, layer.down, tp

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, (DIM,), self.norm.weight, self.norm.bias)
        if self.tp == 1:
            return x + F.linear(F.gelu(F.linear(y, self.up.weight, self.up.bias)), self.down.weight, self.down.bias)
        y = convert(y, "S(1)", "R|P", group="tp")
        y = F.linear(F.gelu(F.linear(y, self.up.weight, self.up.bias)), self.down.weight)
        return x + convert(y, "P", "S(1)", group="tp") + self.down.bias


class _Stage(nn.Module):
    def __init__(self, model: HandModel, layers: range, tp: int, checkpoint: bool) -> None:
        super().__init__()
        self.first, self.last, self.tp = layers.start == 0, layers.stop == LAYERS, tp
        if self.first or self.last:
            self.table = model.embed.weight
        if self.last:
            self.final = model.norm
        self.names = [f"layer{i}" for i in layers]
        for i in layers:
            block: nn.Module = _LayerGraph(model.layers[i], tp)
            block = fx.GraphModule(block, _Tracer().trace(block))
            setattr(self, f"layer{i}", CheckpointedBlock(block) if checkpoint else block)

    def run(self, x: Tensor, labels: Tensor | None, outputs: str = "") -> tuple[Tensor, ...]:
        sharded = self.tp > 1
        if self.first:
            if sharded:
                x = convert(vocab_parallel_embedding(x, self.table, group="tp", vocab=VOCAB), "P", "S(1)", group="tp")
            else:
                x = F.embedding(x, self.table)
        for name in self.names:
            x = getattr(self, name)(x)
        if not self.last:
            return (x,)
        x = F.layer_norm(x, (DIM,), self.final.weight, self.final.bias)
        if sharded:
            x = convert(x, "S(1)", "R|P", group="tp")
        logits = F.linear(x, self.table)
        if outputs:
            if sharded:
                logits = convert(logits, "S(2)", "R", group="tp")
            loss_sum = cross_entropy_sum(logits, labels)
            return (loss_sum.reshape(1) if outputs == "sums" else loss_sum / (labels != -100).sum()), logits
        if sharded:
            return (vocab_parallel_cross_entropy_sum(logits, labels, group="tp").reshape(1),)
        return (cross_entropy_sum(logits, labels).reshape(1),)


class _Only(_Stage):
    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return self.run(input_ids, labels)


class _Whole(_Stage):
    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return self.run(input_ids, labels, outputs="means")


class _WholeSums(_Stage):
    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return self.run(input_ids, labels, outputs="sums")


class _First(_Stage):
    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        return self.run(input_ids, None)


class _Middle(_Stage):
    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return self.run(hidden, None)


class _Last(_Stage):
    def forward(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return self.run(hidden, labels)


_COLUMN, _ROW = ("up.weight", "up.bias"), ("down.weight",)


def _shards(module: nn.Module, model: HandModel, tp: int) -> dict[str, ParameterShard]:
    names = {id(p): name for name, p in model.named_parameters()}
    shards = {}
    for path, p in module.named_parameters(remove_duplicate=False):
        name = names[id(p)]
        text = "R"
        if tp > 1:
            text = (
                "S(0)" if name.endswith(_COLUMN) or name == "embed.weight" else "S(1)" if name.endswith(_ROW) else "R"
            )
        shards[path] = ParameterShard(
            name,
            parse_placement(text),
            tuple(p.shape),
            p.dtype,
            p.requires_grad,
            grad_partial=("tp",) if tp > 1 and text == "R" else (),
        )
    return shards


def _stage_graph(
    kind: type[_Stage], model: HandModel, index: int, layers: range, tp: int, checkpoint: bool
) -> StageGraph:
    stage = kind(model, layers, tp, checkpoint)
    graph_module = fx.GraphModule(stage, _Tracer().trace(stage))
    placeholders = [str(n.target) for n in graph_module.graph.nodes if n.op == "placeholder"]
    last = layers.stop == LAYERS
    return StageGraph(
        index=index,
        graph_module=graph_module,
        receives=tuple(p for p in placeholders if p == "hidden"),
        inputs=tuple(p for p in placeholders if p != "hidden"),
        sends=() if last else ("hidden",),
        outputs=("loss_sum",) if last else (),
        parameters=_shards(graph_module, model, tp),
        buffers={},
    )


def stages(model: HandModel, degrees: Degrees, checkpoint: bool = False) -> tuple[StageGraph, ...]:
    pp, each = degrees.pp, LAYERS // degrees.pp
    kinds = [_Only] if pp == 1 else [_First, *[_Middle] * (pp - 2), _Last]
    return tuple(
        _stage_graph(kind, model, i, range(i * each, (i + 1) * each), degrees.tp, checkpoint)
        for i, kind in enumerate(kinds)
    )


fx.wrap("over_replicas")


class _Count(nn.Module):
    def forward(self, labels: Tensor) -> Tensor:
        return torch.stack([over_replicas((labels != -100).sum().double(), group="dp")])


def capture(model: HandModel) -> TracedModel:
    return trace(model, batch(4))


def parallel(
    model: HandModel,
    traced: TracedModel,
    degrees: Degrees,
    *,
    micro_batch: int = 1,
    checkpoint: bool = False,
    **options: object,
) -> ParallelModule:
    """The hand-made stages run by the engine. `options`: schedule, virtual_stages, and those of ParallelModule."""
    zero = options.pop("zero", 0)
    assert isinstance(zero, int)
    schedule, virtual_stages = str(options.pop("schedule", "1f1b")), options.pop("virtual_stages", 1)
    assert isinstance(virtual_stages, int)
    plan = Plan(
        degrees=degrees,
        global_batch=8,
        seq_len=6,
        micro_batch=micro_batch,
        stages=tuple((f"stage{i}",) for i in range(degrees.pp * virtual_stages)),
        schedule=schedule,
        virtual_stages=virtual_stages,
        precision="fp64",
        zero=zero,
    )
    whole = None
    if degrees.pp == 1:
        kind = _Whole if degrees.dp == 1 else _WholeSums
        stage = _stage_graph(kind, model, 0, range(LAYERS), degrees.tp, checkpoint)
        whole = lambda training: WholeGraph(stage, traced, fx.symbolic_trace(_Count()))  # noqa: E731
    return ParallelModule(
        model,
        Program(traced, stages(model, degrees, checkpoint), fx.symbolic_trace(_Count()), whole),
        plan,
        device=torch.device("cpu"),
        **options,  # type: ignore[arg-type]
    )
