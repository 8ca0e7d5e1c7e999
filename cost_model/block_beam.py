"""The block problem without a solver: a beam over the nodes in order, for when no solver answers.

A state is what later nodes can still see of the choices made: the outputs of nodes that have consumers left, and the
conversions of those outputs that are already paid. Of states alike the cheapest stays; of the rest the `WIDTH`
cheapest. If nothing was cut off, the answer is optimal; else the cheapest state cut off, with the least that the nodes
after it cost, bounds what was lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.placement import Placement

if TYPE_CHECKING:
    from autopar.cost_model.block_ilp import BlockProblem, Choice

__all__ = ["beam_search"]

WIDTH = 512
_WIDEST = 64 * WIDTH

_Conversion = tuple[int, Placement, Placement]
_Key = tuple[tuple[Placement | None, ...], frozenset[_Conversion]]


@dataclass(frozen=True)
class _State:
    cost_us: float
    picks: tuple[int, ...]
    outputs: tuple[Placement | None, ...]
    paid: frozenset[_Conversion]


def beam_search(problem: BlockProblem, width: int = WIDTH) -> tuple[tuple[int, ...], float] | None:
    """(picks, lower bound in us); None if it is certain that nothing connects.

    Widens the beam until an answer is found. Raises ValueError if none is in the widest: neither answer nor proof.
    """
    last_use = [max((c for c, n in enumerate(problem.nodes) if u in n.sources), default=u) for u in _indices(problem)]
    after = [0.0]
    for node in reversed(problem.nodes):
        after.append(after[-1] + min(choice.cost_us for choice in node.choices))
    after.reverse()
    while True:
        states, bound = [_State(0.0, (), (), frozenset())], math.inf
        for u in _indices(problem):
            states, dropped = _kept(_grown(problem, states, u, last_use), width)
            bound = min(bound, dropped + after[u + 1])
        if states:
            best = min(states, key=lambda s: (s.cost_us, s.picks))
            return best.picks, min(best.cost_us, bound)
        if math.isinf(bound):
            return None
        width *= 8
        if width > _WIDEST:
            raise ValueError("no connected choice among the cheapest")


def _indices(problem: BlockProblem) -> range:
    return range(len(problem.nodes))


def _grown(problem: BlockProblem, states: list[_State], u: int, last_use: list[int]) -> dict[_Key, _State]:
    """Every state with every choice of node u, alike ones merged."""
    grown: dict[_Key, _State] = {}
    for state in states:
        for k, choice in enumerate(problem.nodes[u].choices):
            paid = _conversions(problem, state, u, choice)
            if paid is None:
                continue
            cost_us = state.cost_us + choice.cost_us + sum(paid.values())
            alive = [o if last_use[v] > u else None for v, o in enumerate((*state.outputs, choice.output))]
            known = frozenset(c for c in (*state.paid, *paid) if last_use[c[0]] > u)
            key = (tuple(alive), known)
            if key not in grown or cost_us < grown[key].cost_us:
                grown[key] = _State(cost_us, (*state.picks, k), key[0], known)
    return grown


def _kept(grown: dict[_Key, _State], width: int) -> tuple[list[_State], float]:
    """The cheapest states, and the cost of the cheapest that was cut off."""
    ordered = sorted(grown.values(), key=lambda s: (s.cost_us, s.picks))
    return ordered[:width], ordered[width].cost_us if len(ordered) > width else math.inf


def _conversions(problem: BlockProblem, state: _State, u: int, choice: Choice) -> dict[_Conversion, float] | None:
    """What node u's inputs cost that no consumer before has paid; None if one is not offered."""
    found: dict[_Conversion, float] = {}
    for wanted, source in zip(choice.inputs, problem.nodes[u].sources, strict=True):
        if source is None or wanted is None:
            continue
        have = state.outputs[source]
        assert have is not None, "a node comes before its source"
        key = (source, have, wanted)
        if have == wanted or key in state.paid or key in found:
            continue
        price = problem.conversion_us(source, have, wanted)
        if price is None:
            return None
        found[key] = price
    return found
