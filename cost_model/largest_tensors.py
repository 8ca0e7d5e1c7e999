"""The largest tensors that a plan keeps for the backward, by the op that made them: what the report lists."""

from __future__ import annotations

from typing import Any

from autopar.cost_model.activations import local_storages
from autopar.cost_model.model_prices import ModelPrices
from autopar.cost_model.setting_price import SettingPrice

__all__ = ["largest_kept"]

LISTED = 5


def largest_kept(prices: ModelPrices, price: SettingPrice) -> list[dict[str, Any]]:
    """Local bytes of one micro-batch where nothing is recomputed, largest first; `layers` have a tensor like it."""
    d, size, repeats = price.setting.degrees, price.setting.micro_batch, prices.repeats
    parameters = frozenset(prices.traced.parameters)
    found: list[tuple[float, str, int]] = []
    for block in (*prices.blocks.values(), prices.glue):
        measures = prices.measures(block.name, size, d.cp)
        inside = set(block.nodes)
        kept = [k for k in measures.kept if k.keeper in inside and k.root in inside]
        storages = local_storages(kept, measures.kept_elements, price.blocks.layout, d.tp, parameters)
        for (root, _), nbytes in storages.items():
            found.append((nbytes, str(root.meta.get("key", root.target)), repeats.get(block.name, 1)))
    found.sort(key=lambda item: (-item[0], item[1]))
    return [{"tensor": name, "bytes": round(nbytes), "layers": layers} for nbytes, name, layers in found[:LISTED]]
