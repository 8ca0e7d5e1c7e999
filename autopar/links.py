"""Levels of a network, and what single collectives reach on them where that was measured."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.checks import (
    finite_non_negative,
    finite_positive,
    require_count,
    require_fraction,
    require_one_of,
    require_text,
    shown,
)
from autopar.errors import SpecError

__all__ = ["COLLECTIVES", "CollectiveSpec", "LinkSpec", "check_spans"]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@dataclass(frozen=True, kw_only=True)
class CollectiveSpec:
    """What one kind of collective reaches on a link: bytes/s per device and direction, seconds per message, both
    under the formulas of `autopar.cost_model.comm_cost`. In a backend some kinds are rings and others are emulated."""

    kind: str
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        require_one_of(self.kind, COLLECTIVES, "link: collective")
        finite_positive(self.bandwidth, f"link.{self.kind}: bandwidth")
        finite_non_negative(self.latency, f"link.{self.kind}: latency")


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """One level of the network. A group whose ranks all lie within `span` consecutive devices uses this level.

    bandwidth            bytes/s per device and direction when all devices of the level talk
    latency              seconds per message (alpha)
    efficiency           fraction of `bandwidth` large messages reach
    shared_by            devices that share one such link (1: a link each)
    collectives          figures of single collectives, each kind at most once; the others go by those of the link
    """

    name: str
    span: int
    bandwidth: float
    latency: float
    efficiency: float = 0.9
    shared_by: int = 1
    in_network_reduction: bool = False
    collectives: tuple[CollectiveSpec, ...] = ()

    def __post_init__(self) -> None:
        require_text(self.name, "link.name")
        where = f"link {self.name!r}"
        if isinstance(self.span, bool) or not isinstance(self.span, int):
            raise SpecError(
                f"must be a number of devices, not {shown(self.span)}",
                where=f"{where}: span",
                try_="span = 8 for a link that joins 8 devices",
            )
        finite_positive(self.bandwidth, f"{where}: bandwidth")
        finite_non_negative(self.latency, f"{where}: latency")
        require_fraction(self.efficiency, f"{where}: efficiency")
        require_count(self.shared_by, f"{where}: shared_by")
        if not isinstance(self.in_network_reduction, bool):
            raise SpecError(
                f"must be true or false, not {shown(self.in_network_reduction)}",
                where=f"{where}: in_network_reduction",
                try_="true where switches add up (SHARP), or leave it out",
            )
        object.__setattr__(self, "collectives", tuple(self.collectives))
        kinds = [collective.kind for collective in self.collectives]
        if len(set(kinds)) < len(kinds):
            twice = next(kind for kind in kinds if kinds.count(kind) > 1)
            raise SpecError(f"the collective {twice} is given twice", where=where, try_=f"one {twice} a link")

    def rate(self, kind: str) -> tuple[float, float]:
        """(bytes/s, seconds a message) of one kind of collective."""
        for own in self.collectives:
            if own.kind == kind:
                return own.bandwidth, own.latency
        return self.bandwidth * self.efficiency, self.latency


def check_spans(links: tuple[LinkSpec, ...], num_devices: int) -> None:
    """Raises SpecError unless spans grow, each divides the next, and the last is `num_devices`."""
    if not links:
        if num_devices > 1:
            raise SpecError(f"nothing joins the {num_devices} devices", where="links", try_="add a [[link]]")
        return
    inner = 0
    for link in links:
        where = f"link {link.name!r}: span"
        if link.span <= inner:
            raise SpecError(
                f"{link.span} is not above {inner}, the level inside it", where=where, try_="innermost level first"
            )
        if inner and link.span % inner:
            near = max(1, link.span // inner) * inner
            raise SpecError(
                f"{link.span} is not a multiple of {inner}, the level inside it",
                where=where,
                try_=f"{near} or {near + inner}",
            )
        inner = link.span
    if inner != num_devices:
        raise SpecError(
            f"the outermost link spans {inner} of {num_devices} devices",
            where=f"link {links[-1].name!r}: span",
            try_=f"span = {num_devices} on the last [[link]]",
        )
