"""Whether a plan that is in use stays: it does unless another is faster by more than a change is worth.

The best plan by itself cannot be stable: where two are equally fast, the smallest change of a price turns it over. Nor
can any rule that does not know what is in use: it has to change somewhere between prices that ask for one and prices
that ask for the other. So the plan in use is an input (`SearchSpec.keep`). It is kept to the letter if it still fits
and is about as fast as the best. If not, its choices may be: degrees, sequence sharding, micro-batch, schedule, chunks,
ZeRO level and group, and exchange over cp, within which stages, recomputation and placements are the best ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.cost_model.candidates import Partition, Setting
from autopar.cost_model.evaluate import Evaluation, Evaluator
from autopar.cost_model.priced_plan import priced_plan
from autopar.errors import PlanMismatchError
from autopar.ir import TracedModel
from autopar.plan import Plan

__all__ = ["check_kept", "kept_as_it_is", "kept_or_best", "setting_of_plan"]


def check_kept(plan: Plan, traced: TracedModel) -> None:
    """Raises PlanMismatchError if the plan in use is another model's: by its fingerprint, or, in a plan written by
    hand, by its layers."""
    wanted = plan.fingerprints.get("model")
    if wanted and wanted != traced.fingerprint:
        raise PlanMismatchError(
            f"the plan to keep was made for another model (fingerprint {wanted}, this one {traced.fingerprint})",
            where="search.keep", try_="the plan this model runs with, or none",
        )  # fmt: skip
    theirs = [path for stage in plan.layer_paths() for path in stage]
    ours = [segment.path for segment in traced.layers]
    if theirs != ours:
        strange = next((path for path in theirs if path not in ours), None)
        what = f"it has the layer {strange}" if strange else f"it has {len(theirs)} layers, the model {len(ours)}"
        raise PlanMismatchError(
            f"the plan to keep is not of this model: {what}", where="search.keep",
            try_="the plan this model runs with, or none",
        )  # fmt: skip


def kept_or_best(
    best: Evaluation, plan: Plan, setting: Setting | None, evaluator: Evaluator, within: float
) -> tuple[Evaluation, str]:
    """(what is chosen, a notice why), where the plan does not stay as it is. `setting` is that of `plan`, None if it is
    not in the space; `within` is the fraction of the best step time that a change has to pay more than."""
    if setting == best.setting:
        return best, "the plan to keep has the choices of the best one"
    text = _text(plan)
    if setting is None:
        return best, f"the plan to keep ({text}) is not possible on this cluster with this batch and these pins"
    found = evaluator.evaluate(setting)
    if found.pipeline is None:
        return best, f"the plan to keep ({text}) does not fit in memory"
    slower = found.step_s / best.step_s - 1
    if slower > within:
        return best, f"the plan to keep ({text}) would take {slower:.2%} longer than this one"
    return evaluator.proven(found), f"the choices of the plan to keep are kept: {_what_it_costs(slower, within)}"


def kept_as_it_is(
    best: Evaluation, plan: Plan, setting: Setting, evaluator: Evaluator, write: Callable[[Evaluation], Plan],
    within: float,
) -> tuple[Evaluation, str] | None:  # fmt: skip
    """The plan to the letter, and a notice, if it is about as fast as the best. None if it is not, no longer fits, or
    `write` would not write it so (one that a person has changed). `evaluator` has its layout."""
    found = priced_plan(plan, setting, evaluator)
    if found is None or found.step_s > best.step_s * (1 + within) or not _same(write(found), plan):
        return None
    slower = found.step_s / best.step_s - 1
    cost = "it is the best one" if slower < 1e-9 else _what_it_costs(slower, within)
    return found, f"the plan to keep is kept: {cost}"


def _what_it_costs(slower: float, within: float) -> str:
    return f"the best is {max(0.0, slower):.2%} faster, at most {within:.2%}"


def _same(first: Plan, second: Plan) -> bool:
    """Whether they run the same."""
    apart: dict[str, Any] = {"prediction": {}, "solver": {}, "fingerprints": {}}
    return first.replace(**apart) == second.replace(**apart)


def setting_of_plan(
    plan: Plan, partitions: Sequence[Partition], settings_of: Callable[[Partition], list[Setting]]
) -> Setting | None:
    """The setting with the choices of a plan; None if there is none."""
    cut = (plan.degrees, plan.sequence_sharding, plan.micro_batch)
    run = (plan.schedule, plan.virtual_stages, plan.zero, plan.zero_group, plan.context_parallel)
    for partition in partitions:
        if (partition.degrees, partition.sequence_sharding, partition.micro_batch) == cut:
            for s in settings_of(partition):
                if (s.schedule, s.virtual_stages, s.zero, s.zero_group, s.exchange) == run:
                    return s
    return None


def _text(plan: Plan) -> str:
    degrees = " ".join(f"{axis}={n}" for axis, n in vars(plan.degrees).items() if n > 1) or "one device"
    chunks = f" of {plan.virtual_stages} chunks" if plan.virtual_stages > 1 else ""
    return f"{degrees}, micro-batch {plan.micro_batch}, {plan.schedule}{chunks}, ZeRO {plan.zero}"
