"""Searches for other things than the fastest step, each made of searches for the fastest step.

memory   the least memory of any plan (`least_memory`) becomes the limit of an ordinary search
cost     money per token = devices x step time x price: an ordinary search for every number of devices that the cluster
         can be cut to, the cheapest wins, ties go to the faster
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.cost_model.mixed_search import search_groups
from autopar.cost_model.search import least_evaluation, search
from autopar.cost_model.search_result import SearchResult
from autopar.errors import InfeasiblePlanError, SpecError
from autopar.ir import TracedModel
from autopar.mesh import divisors
from autopar.search_spec import SearchSpec
from autopar.specs import ClusterSpec, Pins, TrainSpec

__all__ = ["search_for"]


def search_for(
    traced: TracedModel, cluster: ClusterSpec, train: TrainSpec, pins: Pins | None = None,
    spec: SearchSpec | None = None,
) -> SearchResult:  # fmt: skip
    """The best plan by the objective of `spec`. Raises as `search`, and SpecError for a cost without a price."""
    spec = spec or SearchSpec()
    if cluster.groups:
        if spec.keep is not None:
            raise SpecError("a plan is kept on equal devices", where="search.keep",
                            try_="pins, or a cluster file without [[group]]")  # fmt: skip
        if spec.objective != "step-time":
            raise SpecError(f"the objective {spec.objective} needs equal devices", where="search.objective",
                            try_="step-time, or a cluster file without [[group]]")  # fmt: skip
        return search_groups(traced, cluster, train, pins or Pins(), spec)
    if spec.objective == "memory":
        return _least_memory(traced, cluster, train, pins, spec)
    if spec.objective == "cost":
        return _cheapest(traced, cluster, train, pins, spec)
    return search(traced, cluster, train, pins, spec)


def _least_memory(
    traced: TracedModel, cluster: ClusterSpec, train: TrainSpec, pins: Pins | None, spec: SearchSpec
) -> SearchResult:
    deadline_s = spec.deadline_s
    least, proven_bytes = least_evaluation(traced, cluster, train, pins, spec.share_of(deadline_s, 2))
    needed = math.ceil(least.needed_bytes) + 1
    found = search(traced, cluster, train, pins, spec.share_of(deadline_s, 1), memory_bytes=needed)
    note = f"objective memory: no plan needs less than {proven_bytes / 2**30:.3g} GiB a device, this is the fastest of "
    if proven_bytes < least.needed_bytes:
        note += f"those with {needed / 2**30:.3g} GiB, where the time limit ended the search for less"
        gap = max(found.statistics["gap"], least.needed_bytes / proven_bytes - 1)
        found = found.with_statistics(status="incumbent", gap=gap)
    else:
        note += "those"
    return replace(found, notices=(*found.notices, note))


def _cheapest(
    traced: TracedModel, cluster: ClusterSpec, train: TrainSpec, pins: Pins | None, spec: SearchSpec
) -> SearchResult:
    if cluster.device.price_per_hour is None:
        raise SpecError("the objective is cost, and devices have no price", where="search.objective",
                        try_="--price 2.50, or price in [device]")  # fmt: skip
    if train.global_batch is None:
        raise SpecError("the objective is cost, and no global batch is stated: by default it grows with the devices",
                        where="train", try_="global_batch=512")  # fmt: skip
    found: dict[int, SearchResult] = {}
    last: InfeasiblePlanError | None = None
    counts, deadline_s = divisors(cluster.num_devices), spec.deadline_s
    for i, count in enumerate(counts):
        try:
            share = spec.share_of(deadline_s, len(counts) - i)
            found[count] = search(traced, cluster.resized(count), train, pins, share)
        except InfeasiblePlanError as error:
            last = error
        except SpecError:  # half a node, or pinned degrees that are more devices
            if count == cluster.num_devices:
                raise
    if not found:
        assert last is not None
        raise last
    best = min(found, key=lambda n: (float(f"{_device_s(n, found[n]):.9e}"), -n))
    costs = ", ".join(f"{n}: {found[n].plan.prediction['cost_per_million_tokens']:.3g}" for n in found)
    note = f"objective cost: {best} of {cluster.num_devices} devices; money per million tokens by devices: {costs}"
    bound_s = min(n * result.statistics["bound_s"] for n, result in found.items()) / best
    return replace(found[best], notices=(*found[best].notices, note)).against(bound_s)


def _device_s(count: int, result: SearchResult) -> float:
    return count * float(result.plan.prediction["step_time_s"])
