"""Peak of memory of forward and backward, by following every storage from where it is made to where it is dropped.

Forward runs the ops in order; a value lives until its last reader has run, or until the backward of an op that keeps
it. Backward runs them in reverse: a gradient lives until the op that consumes it has run; two gradients of one value
are summed in place if nothing else holds the first, else into a new one (torch's InputBuffer). A recomputed segment
keeps its inputs, runs its forward again when its backward is due, up to the last op that keeps something.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from autopar.cost_model.autograd_ops import AutogradOp, Gradient, Key

__all__ = ["Footprint", "Piece", "footprint"]


@dataclass(frozen=True)
class Footprint:
    """Bytes beside parameters, buffers and model inputs: kept from forward to backward, and the largest sum at a time
    in the forward and in the backward."""

    kept: float
    forward_peak: float
    backward_peak: float

    @property
    def peak(self) -> float:
        return max(self.forward_peak, self.backward_peak)


@dataclass
class _Heap:
    """Storages by id, each with its bytes and number of holders."""

    now: float = 0.0
    peak: float = 0.0
    sizes: dict[Key, float] = field(default_factory=dict)
    holders: Counter[Key] = field(default_factory=Counter)
    made: int = 0

    def new(self, nbytes: float) -> Key:
        self.made += 1
        key = ("storage", self.made)
        self.sizes[key] = nbytes
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        return key

    def hold(self, key: Key | None) -> None:
        if key is not None:
            self.holders[key] += 1

    def drop(self, key: Key | None) -> None:
        if key is None:
            return
        self.holders[key] -= 1
        if self.holders[key] <= 0:
            del self.holders[key]
            self.now -= self.sizes.pop(key)

    def for_a_while(self, nbytes: float) -> None:
        self.peak = max(self.peak, self.now + nbytes)


@dataclass(frozen=True)
class Piece:
    """Consecutive ops that run alike.

    frame       pieces of one module share it: what comes into a module from outside lives until the module returns
    recomputed  keeps only its inputs and the outputs `keeps`, and runs again; an output in `unread` is neither
    """

    ops: Sequence[AutogradOp]
    frame: int
    recomputed: bool = False
    keeps: frozenset[Key] = frozenset()
    unread: frozenset[Key] = frozenset()


def footprint(pieces: Sequence[Piece], *, parameters: Collection[Key] = (), gradients_exist: bool = True) -> Footprint:
    """Of one micro-batch, whose pieces run in order.

    parameters       values whose storage and, once it is there, gradient is counted elsewhere
    gradients_exist  parameters have gradients to add to (every micro-batch but the first)
    """
    return _Run(pieces, frozenset(parameters), gradients_exist).run()


class _Run:
    def __init__(self, pieces: Sequence[Piece], parameters: frozenset[Key], gradients_exist: bool) -> None:
        self.pieces, self.parameters, self.gradients_exist = pieces, parameters, gradients_exist
        self.heap = _Heap()
        self.storage: dict[Key, Key] = {}
        self.kept: dict[int, list[Key | None]] = {}  # by id of the op
        self.inside: dict[int, dict[Key, Key]] = {}  # storages of what goes into a recomputed piece, and of its tape
        self.gradients: dict[Key, list[Key]] = {}
        # How many gradients of a value are still to come: a tied weight is added to when it has all of them.
        self.waiting = Counter(
            value for piece in pieces for op in piece.ops
            for value, gradient in zip(op.inputs, op.gradients, strict=False) if gradient is not None
        )  # fmt: skip
        self.ends = [self._composite_ends(piece.ops) for piece in pieces]
        self.last = self._last_uses()

    def run(self) -> Footprint:
        for i, piece in enumerate(self.pieces):
            self._forward(i, piece)
        kept, forward_peak = self.heap.now, self.heap.peak
        self.heap.peak = 0.0
        self._seed()
        for i, piece in reversed(list(enumerate(self.pieces))):
            if piece.recomputed:
                self._again(i, piece)
            for op in reversed(piece.ops):
                self._backward(op)
            for key in self.inside.pop(i, {}).values():
                self.heap.drop(key)
        return Footprint(kept, forward_peak, self.heap.peak)

    # --- forward ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _composite_ends(ops: Sequence[AutogradOp]) -> list[int]:
        """For each op the last one of its composite: what a composite makes inside lives to its end."""
        last = {op.node: j for j, op in enumerate(ops)}
        return [last[op.node] for op in ops]

    def _last_uses(self) -> dict[Key, tuple[int, int]]:
        """(piece, op) after which a value is held by no name of the program any more."""
        frame_end = {piece.frame: i for i, piece in enumerate(self.pieces) if piece.ops}
        born: dict[Key, tuple[int, int]] = {}
        last: dict[Key, tuple[int, int]] = {}
        for i, piece in enumerate(self.pieces):
            for j, op in enumerate(piece.ops):
                for value in op.inputs:
                    last[value] = max(last.get(value, (0, 0)), self._read_until(i, j, born.get(value), frame_end))
                born.setdefault(op.output, (i, piece.frame))
                last.setdefault(op.output, (i, j))
        return last

    def _read_until(self, i: int, j: int, born: tuple[int, int] | None, frame_end: dict[int, int]) -> tuple[int, int]:
        piece = self.pieces[i]
        if born is not None and born[1] == piece.frame:
            own = born[0] == i or not piece.recomputed
            return (i, self.ends[i][j] if own else len(piece.ops) - 1)
        end = frame_end[piece.frame]
        return (end, len(self.pieces[end].ops) - 1)

    def _forward(self, index: int, piece: Piece) -> None:
        if piece.recomputed:
            made = {op.output for op in piece.ops}
            entering = dict.fromkeys(v for op in piece.ops for v in op.inputs if v not in made and v in self.storage)
            self.inside[index] = {v: self.storage[v] for v in entering}
            for key in self.inside[index].values():
                self.heap.hold(key)
        for j, op in enumerate(piece.ops):
            self._run_op(op, keeps=not piece.recomputed)
            if op.output in piece.keeps:
                self._put_on_tape(index, op)
            self._drop_dead(index, j)

    def _put_on_tape(self, index: int, op: AutogradOp) -> None:
        """Output and statistics: everything the kernel returns."""
        tape = {op.output: self.storage[op.output]}
        if op.kept_bytes:
            tape[op.output, "statistics"] = self.heap.new(op.kept_bytes)
        for key in tape.values():
            self.heap.hold(key)
        self.inside[index] |= tape

    def _run_op(self, op: AutogradOp, keeps: bool, made: Key | None = None, statistics: Key | None = None) -> None:
        """`made` and `statistics`: storages of what is there already."""
        root = self.storage.get(op.inputs[0]) if op.view else made
        if not op.view and root is None:
            root = self.heap.new(op.nbytes)
        if root is not None:
            self.storage[op.output] = root
            self.heap.hold(root)
        if keeps and op.differentiable:
            self._keep(op, statistics)

    def _keep(self, op: AutogradOp, statistics: Key | None = None) -> None:
        held = [self.storage.get(value) for value in op.saves if value not in self.parameters]
        for key in held:
            self.heap.hold(key)
        if op.kept_bytes:
            held.append(statistics or self.heap.new(op.kept_bytes))
            self.heap.hold(held[-1])
        self.kept[id(op)] = held

    def _drop_dead(self, index: int, j: int) -> None:
        ops = self.pieces[index].ops
        if j == len(ops) - 1:  # whatever is still held by the frame, too
            candidates = [v for v in self.storage if self.last.get(v) == (index, j)]
        else:
            candidates = [v for v in _touched(ops, j) if v in self.storage and self.last.get(v) == (index, j)]
        for value in candidates:
            self.heap.drop(self.storage.pop(value))

    def _again(self, index: int, piece: Piece) -> None:
        """The second run, up to the last op that keeps something, which need not finish if it keeps its inputs."""
        there = self.inside[index]
        made = {op.output for op in piece.ops}
        for value, key in there.items():
            if value not in made:
                self.storage[value] = key
                self.heap.hold(key)
        saving = [j for j, op in enumerate(piece.ops) if op.differentiable and (op.saves or op.kept_bytes)]
        nothing = self.heap.new(0.0)
        self.heap.hold(nothing)
        for j, op in enumerate(piece.ops[: saving[-1] + 1] if saving else ()):
            if j == saving[-1] and op.output not in op.saves and not op.kept_bytes:
                self._keep(op)
            else:
                made_before = there.get(op.output, nothing if op.output in piece.unread else None)
                self._run_op(op, True, made_before, there.get((op.output, "statistics")))
            self._drop_inside(piece, index, j, made)
        for value in [v for v in self.storage if v in made or v in there]:
            self.heap.drop(self.storage.pop(value))
        self.heap.drop(nothing)

    def _drop_inside(self, piece: Piece, index: int, j: int, made: set[Key]) -> None:
        for value in _touched(piece.ops, j):
            if value in made and value in self.storage and self.last.get(value, (0, 0)) <= (index, j):
                self.heap.drop(self.storage.pop(value))

    # --- backward -----------------------------------------------------------------------------------------------------

    def _seed(self) -> None:
        """A gradient of the last output of the last segment that has one."""
        last = next(op for piece in reversed(self.pieces) for op in reversed(piece.ops) if op.differentiable)
        key = self.heap.new(last.nbytes)
        self.heap.hold(key)
        self.gradients[last.output] = [key]

    def _backward(self, op: AutogradOp) -> None:
        incoming = self.gradients.pop(op.output, [])
        if not op.differentiable or not incoming:
            for key in incoming:
                self.heap.drop(key)
            self._release(op)
            return
        made: list[tuple[Key, Gradient, Key]] = []
        for value, gradient in zip(op.inputs, op.gradients, strict=True):
            if gradient is not None:
                key = self.heap.new(max(gradient.nbytes, gradient.made)) if gradient.nbytes else incoming[0]
                self.heap.hold(key)
                made.append((value, gradient, key))
        self.heap.for_a_while(op.backward_bytes)
        made = [(value, gradient, self._summed(gradient, key)) for value, gradient, key in made]
        for key in incoming:
            self.heap.drop(key)
        self._release(op)
        for value, gradient, key in made:
            self._arrive(value, gradient, key)

    def _summed(self, gradient: Gradient, key: Key) -> Key:
        if not gradient.nbytes or gradient.made <= gradient.nbytes:
            return key
        small = self.heap.new(gradient.nbytes)
        self.heap.hold(small)
        self.heap.drop(key)
        return small

    def _release(self, op: AutogradOp) -> None:
        for key in self.kept.pop(id(op), []):
            self.heap.drop(key)

    def _arrive(self, value: Key, gradient: Gradient, key: Key) -> None:
        self.waiting[value] -= 1
        if value in self.parameters and self.gradients_exist and not self.waiting[value]:
            for waited in (*self.gradients.pop(value, ()), key):  # added to what is there
                self.heap.drop(waited)
            return
        there = self.gradients.get(value)
        if there is None or gradient.part:
            self.gradients.setdefault(value, []).append(key)
            return
        old = there[0]
        if self.heap.holders[old] == 1:
            self.heap.drop(key)
            return
        total = self.heap.new(max(self.heap.sizes[old], self.heap.sizes[key]))
        self.heap.hold(total)
        self.heap.drop(old)
        self.heap.drop(key)
        there[0] = total


def _touched(ops: Sequence[AutogradOp], j: int) -> dict[Key, None]:
    """Values read or made by an op and, as its composite ends with it, by the ops of its composite before."""
    first = j
    while first and ops[first - 1].node is ops[j].node:
        first -= 1
    return dict.fromkeys(v for op in ops[first : j + 1] for v in (*op.inputs, op.output))
