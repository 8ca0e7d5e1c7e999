"""Cut the outlined graph into pipeline stages.

before    one graph of layer calls and glue
after     a StageGraph a stage. Its placeholders are what earlier stages send (in order), then the model inputs it needs
requires  outline_blocks; plan.stages names every layer once, in order (PlanMismatchError)
ensures   every node runs on its segment's stage, except those computed from inputs and buffers alone (masks, positions,
          rotary tables), which every stage that needs them computes itself. A tensor for a later stage is passed along
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.errors import PassError, PlanMismatchError
from autopar.graph_walks import input_only, output_node, stage_of_segments
from autopar.ir import ParameterShard, Segment, StageGraph, TracedModel
from autopar.passes.dead_code import is_update
from autopar.passes.outline_blocks import attribute
from autopar.placement import REPLICATE
from autopar.plan import Plan
from autopar.runtime.recompute import CheckpointedBlock

__all__ = ["check_stages", "split_stages"]


def split_stages(
    graph_module: fx.GraphModule, traced: TracedModel, plan: Plan, outputs: tuple[str, ...]
) -> tuple[StageGraph, ...]:
    """The stages of `graph_module`, first to last. `outputs` names what the last one returns."""
    check_stages(traced.segments, plan)
    stage_of = stage_of_segments(traced.segments, plan)
    count = len(plan.stages)
    graph = graph_module.graph
    free = input_only(graph)
    home = {n: stage_of[n.meta["segment"]] for n in graph.nodes if n.op in ("call_function", "call_module")}
    result = output_node(graph)
    needs = [_Needs() for _ in range(count)]
    for node, stage in home.items():
        if node not in free:
            _require(node, stage, home, free, needs)
        elif is_update(node):
            for every in range(count):  # so that the buffer is the same wherever it is read
                _require(node, every, home, free, needs)
    for source in result.all_input_nodes:
        _receive(source, count - 1, home, free, needs)
    return tuple(_build(graph_module, traced, s, needs, outputs, result) for s in range(count))


def check_stages(segments: Sequence[Segment], plan: Plan) -> None:
    """Raise PlanMismatchError unless the plan's stages name every layer once, in order."""
    layers = [s.path for s in segments if s.kind == "layer"]
    listed = [path for stage in plan.layer_paths() for path in stage]
    if listed != layers:
        missing = [p for p in layers if p not in listed]
        unknown = [p for p in listed if p not in layers]
        what = f"not listed: {', '.join(missing)}" if missing else "order differs"
        what = f"no such layer: {', '.join(unknown)}" if unknown else what
        raise PlanMismatchError(
            f"the stages do not cut this model's {len(layers)} layers ({what})",
            where="stages",
            try_=f"name each layer once, in order: {' .. '.join(dict.fromkeys(layers[:1] + layers[-1:])) or 'none'}",
        )


@dataclass
class _Needs:
    """What one stage consists of: nodes it runs, tensors it receives, tensors it sends."""

    runs: set[fx.Node] = field(default_factory=set)
    receives: dict[fx.Node, None] = field(default_factory=dict)
    sends: dict[fx.Node, None] = field(default_factory=dict)


def _require(node: fx.Node, stage: int, home: Mapping[fx.Node, int], free: set[fx.Node], needs: list[_Needs]) -> None:
    """`node` runs on `stage`; get its arguments there."""
    needs[stage].runs.add(node)
    for source in node.all_input_nodes:
        _receive(source, stage, home, free, needs)


def _receive(source: fx.Node, stage: int, home: Mapping[fx.Node, int], free: set[fx.Node], needs: list[_Needs]) -> None:
    """Make `source` available on `stage`: repeat it there, or pass it along from where it is made."""
    if source.op in ("placeholder", "get_attr"):
        needs[stage].runs.add(source)
        return
    if source in free:
        if source not in needs[stage].runs:
            _require(source, stage, home, free, needs)
        return
    made = home[source]
    if made > stage:
        raise PassError(
            f"stage {stage} reads a tensor made on stage {made}",
            where=f"split_stages: {source.name}",
            try_="another cut",
        )
    if made < stage:
        _check_boundary(source)
    for between in range(made, stage):
        needs[between].sends[source] = None
        needs[between + 1].receives[source] = None


def _check_boundary(source: fx.Node) -> None:
    placement = source.meta.get("placement")
    if placement is not None and source.meta["grad"] and not (placement == REPLICATE or placement.is_shard):
        raise PassError(f"a tensor that crosses stages has placement {placement}", where=f"split_stages: {source.name}")


def _build(
    graph_module: fx.GraphModule,
    traced: TracedModel,
    stage: int,
    needs: list[_Needs],
    outputs: tuple[str, ...],
    result: fx.Node,
) -> StageGraph:
    need, last = needs[stage], stage == len(needs) - 1
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    receives = _in_order(graph_module.graph, need.receives)
    inputs = [n for n in graph_module.graph.nodes if n.op == "placeholder" and n in need.runs]
    for node in [*receives, *inputs]:
        copies[node] = graph.placeholder(node.name if node in need.receives else str(node.target))
        copies[node].meta = dict(node.meta)
    for node in graph_module.graph.nodes:
        if node in need.runs and node not in copies:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            copies[node].meta = dict(node.meta)
    sends = _in_order(graph_module.graph, need.sends)
    if last:
        graph.output(fx.node.map_arg(tuple(result.args[0]), lambda n: copies[n]))  # type: ignore[arg-type]
    else:
        graph.output(tuple(copies[n] for n in sends))
    module = fx.GraphModule(graph_module, graph, f"Stage{stage}")
    parameters, buffers = _state_of(module, traced)
    return StageGraph(
        index=stage,
        graph_module=module,
        receives=tuple(n.name for n in receives),
        inputs=tuple(str(n.target) for n in inputs),
        sends=tuple(n.name for n in sends),
        outputs=outputs if last else (),
        parameters=parameters,
        buffers=buffers,
    )


def _in_order(graph: fx.Graph, nodes: Mapping[fx.Node, None]) -> list[fx.Node]:
    return [n for n in graph.nodes if n in nodes]


def _state_of(module: fx.GraphModule, traced: TracedModel) -> tuple[dict[str, ParameterShard], dict[str, str]]:
    """Parameters and buffers of a stage by attribute path, in order of use, layers included."""
    parameters: dict[str, ParameterShard] = {}
    buffers: dict[str, str] = {}
    for prefix, graph in _graphs(module):
        for node in graph.nodes:
            if node.op != "get_attr":
                continue
            name, path = str(node.target), f"{prefix}{node.target}"
            spec = traced.parameters.get(name)
            if spec is None:
                if name in traced.buffers:
                    buffers[path] = name  # lifted constants are no state of the model; they travel with the graph
                continue
            parameters[path] = ParameterShard(
                name=name,
                placement=node.meta.get("placement", REPLICATE),
                shape=spec.shape,
                dtype=spec.dtype,
                requires_grad=spec.requires_grad,
                grad_partial=tuple(node.meta.get("grad_partial", ())),
            )
    return parameters, buffers


def _graphs(module: fx.GraphModule, prefix: str = "") -> list[tuple[str, fx.Graph]]:
    """Every graph below `module`, itself included, with the path at which its attributes are found."""
    found = [(prefix, module.graph)]
    for node in module.graph.nodes:
        if node.op == "call_module":
            block, path = attribute(module, str(node.target)), f"{prefix}{node.target}."
            if isinstance(block, CheckpointedBlock):
                block, path = block.block, f"{path}block."
            assert isinstance(block, fx.GraphModule)
            found += _graphs(block, path)
    return found
