"""The collectives that a setting is priced for, on the ranks of its slowest stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autopar.cost_model.pipeline_ilp import PipelineSolution
from autopar.cost_model.setting_price import SettingPrice
from autopar.cost_model.step_price import Unit

__all__ = ["collectives_of"]


def collectives_of(price: SettingPrice, solution: PipelineSolution) -> tuple[Mapping[str, object], ...]:
    """Kind, axis, bytes of the whole tensor and times a step; repetitions of recomputed layers are left out."""
    slowest = max(range(price.pp), key=lambda s: solution.stages[s].time_s)
    stage, m, d = solution.stages[slowest], price.m, price.setting.degrees
    tally: Counter[tuple[str, str, int]] = Counter()
    for n, layer in zip(stage.counts, price.classes, strict=True):
        for kind, whole in layer.unit.price.collectives:
            tally[kind, "tp", round(whole)] += m * n
        _count_exchange(tally, price, layer.unit, m * n)
    for unit in price.end_units(slowest):
        for kind, whole in unit.price.collectives:
            tally[kind, "tp", round(whole)] += m
    if price.pp > 1:
        borders = 2 * price.setting.virtual_stages - (slowest == 0) - (slowest == price.pp - 1)
        tally["send", "pp", round(price.blocks.border_bytes)] += m * borders
    if d.dp * d.cp > 1:
        _count_data_parallel(tally, price, price.trained(slowest, stage.counts), price.frozen(slowest, stage.counts))
    return tuple({"kind": k, "axis": a, "bytes": b, "count": n} for (k, a, b), n in tally.items() if b and n)


def _count_exchange(tally: Counter[tuple[str, str, int]], price: SettingPrice, unit: Unit, times: int) -> None:
    cp, keys = price.setting.degrees.cp, unit.key_value_bytes
    if cp == 1:
        return
    if price.setting.exchange == "ring":
        tally["send", "cp", round(keys)] += times * (3 * cp - 2)
    elif price.setting.exchange == "all-gather":
        tally["all_gather", "cp", round(keys * cp)] += 2 * times
        tally["reduce_scatter", "cp", round(keys * cp)] += times
    else:
        tally["all_to_all", "cp", round((2 * unit.query_bytes + keys) * cp)] += 2 * times


def _count_data_parallel(
    tally: Counter[tuple[str, str, int]], price: SettingPrice, parameters: float, frozen: float
) -> None:
    zero, traits, m = price.setting.zero, price.step.traits, price.m
    if zero == 0:
        tally["all_reduce", "dp", round(parameters * traits.reduce_bytes)] += 1
        return
    tally["reduce_scatter", "dp", round(parameters * traits.reduce_bytes)] += 1 if zero == 1 else m
    gathered = parameters + (frozen if zero == 3 else 0.0)
    tally["all_gather", "dp", round(gathered * traits.gather_bytes)] += 2 * m if zero == 3 else 1
