"""Gradient sums across ranks, once per step: over data-parallel ranks while backward still runs, then over the others.

Losses are divided by the number of tokens of the whole batch before backward, so every reduction is a sum.

Data-parallel ranks are those over dp, and over cp where a gradient is partial there. Their sum is cut into buckets over
the parameters in reverse execution order, the order in which their gradients get ready. A bucket is sent when the last
micro-batch has added to all its members. Buckets go out in a fixed order, which every rank follows, and contain the
same elements whether they are sent early or at the end: overlap changes no bit.

Gradients are views of their buckets and are summed in place, so there are no second copies of them, except of 16-bit
ones that are summed in fp32: of two buckets at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.plan import BUCKET_BYTES
from autopar.runtime.clock import waiting
from autopar.runtime.collectives import widened
from autopar.runtime.gradient_bucket import GradientBucket, cut_into_buckets, has_own_memory
from autopar.runtime.judge import StepJudge
from autopar.runtime.sharding import local_part

__all__ = ["GradientReducer", "GroupSum", "mark_backward", "sum_gradients"]


@dataclass(frozen=True)
class GroupSum:
    """Parameters whose gradients are summands over `ranks` (global ranks) after backward; None gradients count as zero.

    `ranks` are all of `group`, or those of its members that hold the parameters.
    """

    parameters: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _InFlight:
    """`travelling` is what is summed: the gradients in `flat` themselves, or a wider copy."""

    flat: Tensor
    travelling: Tensor
    work: dist.Work
    group: dist.ProcessGroup

    def land(self) -> None:
        with waiting(self.group):
            self.work.wait()
        if self.travelling is not self.flat:
            self.flat.copy_(self.travelling)


_WIDE_IN_FLIGHT = 2
"""Wider copies of buckets at a time. A third would not be faster: while one travels the next is ready."""


class GradientReducer:
    """Sums gradients over their data-parallel group and then over each of `sums`, in that order.

    `parameters` in execution order, each with its group or None; those that need no gradient are skipped. Between
    `begin` and `finish` exactly `micro_batches` run. Gradients that were there before `begin` are kept and added at the
    end, so that calling step twice accumulates instead of reducing the first gradient again.
    `wide`: 16-bit gradients are summed in fp32. `uses`: by parameter, backward passes of a micro-batch that add to its
    gradient, where several stages of this rank read it; one of the others. `hooked`: autograd says when it has added to
    a gradient; a backward in halves does not, and memory that a bucket kept would lie idle beside its gradients.
    """

    def __init__(
        self,
        parameters: Mapping[nn.Parameter, dist.ProcessGroup | None],
        sums: Sequence[GroupSum] = (),
        *,
        uses: Mapping[nn.Parameter, int] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = True,
        wide: bool = False,
        hooked: bool = True,
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._sums = tuple(sums)
        self._overlap = overlap
        self._group_of = {p: group for p, group in parameters.items() if p.requires_grad and group is not None}
        cut = cut_into_buckets(reversed(list(self._group_of)), bucket_bytes, self._group_of)
        self._buckets = [GradientBucket(members) for members in cut]
        self._bucket_of = {p: i for i, members in enumerate(cut) for p in members}
        self._missing: dict[nn.Parameter, int] = {}
        self._unready: list[int] = []
        self._silent: set[nn.Parameter] = set()
        self._in_flight: list[_InFlight] = []
        self._sent: set[nn.Parameter] = set()
        self._next_bucket = 0
        self._earlier: dict[nn.Parameter, Tensor] = {}
        self._versions: list[int] = []
        self._active = self._begun = False
        self._backward = -1  # of autograd's passes, the one that is reduced without `begin` and `finish`
        self._wide, self._uses, self._hooked = wide, dict(uses or {}), hooked
        for p in self._bucket_of:
            p.register_post_accumulate_grad_hook(self.arrived)

    @property
    def idle(self) -> bool:
        """True if there is nothing to reduce at all."""
        return not self._group_of and not self._sums

    def begin(self, micro_batches: int) -> None:
        """Expect the backward passes of that many micro-batches."""
        self._earlier = {p: p.grad for p in self._parameters if p.grad is not None}
        for p in self._earlier:
            p.grad = None
        # A parameter that got no gradient in the last step would hold back its bucket and all after it.
        self._missing = {p: micro_batches * self._uses.get(p, 1) for p in self._bucket_of if p not in self._silent}
        self._unready = [sum(p in self._missing for p in bucket.members) for bucket in self._buckets]
        self._versions = [] if self.idle else [p._version for p in self._parameters]
        self._sent, self._next_bucket = set(), 0
        self._active = self._begun = True
        for bucket in self._buckets:
            bucket.begin(keeps_memory=self._hooked)

    def arrived(self, parameter: nn.Parameter) -> None:
        """A backward pass has added to the gradient of `parameter`; autograd says so itself for what it computes."""
        if not self._active or parameter not in self._missing:
            return
        self._buckets[self._bucket_of[parameter]].take(parameter)
        self._missing[parameter] -= 1
        if self._missing[parameter] == 0:
            self._unready[self._bucket_of[parameter]] -= 1
            if self._overlap:
                self._send_ready_buckets()

    def _send_ready_buckets(self) -> None:
        while self._next_bucket < len(self._buckets) and self._unready[self._next_bucket] == 0:
            self._send(self._buckets[self._next_bucket])
            self._next_bucket += 1

    def _send(self, bucket: GradientBucket) -> None:
        # Those silent last time wait for the end: backward may still add to what they have got this time.
        members = [p for p in bucket.members if p.grad is not None and not (self._active and p in self._silent)]
        if not members:
            return
        for p in members:
            bucket.take(p)
        self._sent.update(members)
        if self._wide and len(self._in_flight) == _WIDE_IN_FLIGHT:
            self._in_flight.pop(0).land()
        flat, group = bucket.flat, self._group_of[members[0]]
        travelling = widened(flat) if self._wide else flat
        work = dist.all_reduce(travelling, group=group, async_op=True)
        assert work is not None
        self._in_flight.append(_InFlight(flat, travelling, work, group))

    def finish(self, judge: Callable[[], None] | None = None) -> None:
        """Send what is left, wait for all of it, and leave the complete gradients in `.grad`.

        `judge` is called when this step's gradients are complete, before earlier ones are added, and may change them.
        """
        self._active = False
        self._refuse_steps_inside()
        for bucket in self._buckets[self._next_bucket :]:
            self._send(bucket)
        late = [p for p in self._bucket_of if p.grad is not None and p not in self._sent]  # silent last time
        for members in cut_into_buckets(late, 2**62, self._group_of):
            self._send(GradientBucket(members))
        for flight in self._in_flight:
            flight.land()
        self._in_flight = []
        self._silent = {p for p in self._bucket_of if p.grad is None}
        for group_sum in self._sums:
            sum_gradients(group_sum, self._wide)
        earlier, self._earlier, self._begun = self._earlier, {}, False
        try:
            if judge is not None:
                judge()
        except BaseException:  # what earlier steps added up is not lost with this one
            for p, gradient in earlier.items():
                p.grad = gradient
            raise
        for p, gradient in earlier.items():
            p.grad = gradient if p.grad is None else gradient.add_(p.grad)

    def _refuse_steps_inside(self) -> None:
        """Hooks in backward find this rank's part of a gradient: what steps there trains each rank by its own."""
        stepped = any(p._version != before for p, before in zip(self._parameters, self._versions, strict=False))
        if stepped or any(p.grad is None for bucket in self._buckets for p in bucket.taken):
            self.abandon()
            raise AutoparError(
                "parameters were changed, or their gradients taken away, before the gradients were complete; ranks "
                "have drifted apart",
                where="step",
                try_="optimizer.step() after pm.step(batch), not in a hook on parameters",
            )

    def abandon(self) -> None:
        """Leave the gradients as they were before `begin`: what came between was broken off."""
        if not self._begun:
            return
        self._active = self._begun = False
        self._in_flight = []
        for p in self._parameters:
            p.grad = self._earlier.get(p)
        self._earlier = {}

    def reduce_after_backward(self, output: Tensor, judge: StepJudge | None = None) -> Tensor:
        """`output` itself; the backward pass that starts from it is reduced, without `begin` and `finish`, and judged.

        For users who call `loss.backward()` themselves.
        """
        if not output.requires_grad or (self.idle and judge is None):
            return output
        return mark_backward(output, partial(self._around_backward, judge))

    def _around_backward(self, judge: StepJudge | None) -> Tensor | None:
        """The factor of what the user's loss sends back."""
        # Several outputs may be marked. A pass that an error ended never came to its end.
        current = torch._C._current_graph_task_id()
        if current != self._backward or not self._active:
            self.abandon()
            self._backward = current
            self.begin(1)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self.finish, judge))
        return None if judge is None else judge.scale


def mark_backward(x: Tensor, on_backward: Callable[[], Tensor | None]) -> Tensor:
    """`x` itself; `on_backward` is called before its gradient goes further down, multiplied by what it returns."""
    result: Tensor = _BackwardMarker.apply(x, on_backward)
    return result


class _BackwardMarker(torch.autograd.Function):
    """Identity whose backward, the first thing to run, calls `on_backward`."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, on_backward: Callable[[], Tensor | None]
    ) -> Tensor:
        ctx.on_backward = on_backward  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        factor = ctx.on_backward()  # type: ignore[attr-defined]
        if factor is None:
            return grad, None
        return (grad.to(factor.dtype) * factor).to(grad.dtype), None  # the factor itself may be beyond fp16


def sum_gradients(group_sum: GroupSum, wide: bool = False) -> None:
    """Replace each gradient by its sum over the ranks, once per dtype; every rank ends with the same bits.

    `wide`: 16-bit gradients are summed in fp32.
    """
    members = [p for p in group_sum.parameters if p.requires_grad]
    for p in members:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for bucket in cut_into_buckets(members, 2**62):
        _sum_together([local_part(p.grad) for p in bucket if p.grad is not None], group_sum, wide)


def _sum_together(gradients: list[Tensor], group_sum: GroupSum, wide: bool) -> None:
    """In place; a gradient alone in its memory is not copied."""
    alone = len(gradients) == 1 and gradients[0].is_contiguous() and has_own_memory(gradients[0])
    flat = gradients[0].view(-1) if alone else torch.cat([g.flatten() for g in gradients])
    total = widened(flat) if wide else flat
    with waiting(group_sum.group):
        if len(group_sum.ranks) == group_sum.group.size():
            dist.all_reduce(total, group=group_sum.group)
        else:
            total = _exchange(total, group_sum)
    if not alone or total is not flat:
        for gradient, piece in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))


def _exchange(mine: Tensor, group_sum: GroupSum) -> Tensor:
    """Sum over some ranks of a group, each sending to each: for the usual two no more bytes than an all-reduce, and no
    process group of its own (thousands of them, one per set of stages and tp x dp position, on a large mesh)."""
    rank, group = dist.get_rank(), group_sum.group
    parts = {peer: mine if peer == rank else torch.empty_like(mine) for peer in group_sum.ranks}
    others = [peer for peer in group_sum.ranks if peer != rank]
    operations = [dist.P2POp(dist.isend, mine, peer, group) for peer in others]
    operations += [dist.P2POp(dist.irecv, parts[peer], peer, group) for peer in others]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    total = torch.zeros_like(mine)
    for part in parts.values():  # in the order of `ranks` everywhere: the same bits on each
        total += part
    return total
