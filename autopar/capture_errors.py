"""Turn whatever torch.export raises into one sentence: which module, why, what to change."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import TracebackType

import torch
from torch import fx, nn

from autopar.errors import UnsupportedModelError
from autopar.user_code import users_place

__all__ = ["CustomBackwardError", "changed_root", "explain_failure", "export_is_quiet", "refuse_effects"]

# (text in the error's class or message, reason, remedy), most specific first
_VALUES = ("control flow depends on tensor values", "use torch.where or make the branch a constant flag")
_WHOLE = "the chained error for the full text (--traceback on the command line)"
_REASONS = (
    ("GuardOnDataDependent", *_VALUES),
    ("data-dependent", *_VALUES),
    ("DynamicCache", "the output holds a key/value cache", "set use_cache=False for training"),
    ("unsupported input type", "torch.export cannot flatten an input or output", "register its type as a pytree"),
    ("Constraints violated", "the code fixes the batch or sequence size", "derive sizes from the inputs (x.shape)"),
)


@contextlib.contextmanager
def export_is_quiet() -> Iterator[None]:
    """Within: torch's warnings about what it cannot export, and the graphs it prints beside them, are held back.

    What went to stderr is printed after all if nothing is raised; if something is, it says what they said.
    """
    handlers = {h for name in list(logging.root.manager.loggerDict) if name.split(".")[0] == "torch"
                for h in logging.getLogger(name).handlers}  # fmt: skip
    held = io.StringIO()
    for handler in handlers:
        handler.addFilter(_is_no_warning)
    try:
        with contextlib.redirect_stderr(held):
            yield
        sys.stderr.write(held.getvalue())
    finally:
        for handler in handlers:
            handler.removeFilter(_is_no_warning)


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno != logging.WARNING


class CustomBackwardError(Exception):
    """Raised inside the user's forward where an autograd.Function cannot be kept as one op: its name and why."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"the autograd.Function {name} {why}")


def explain_failure(error: Exception, shell: nn.Module) -> UnsupportedModelError:
    """The UnsupportedModelError for a failed export: innermost user module and source line, reason, remedy."""
    path, line = _place(error, shell)
    if isinstance(error, CustomBackwardError):
        return UnsupportedModelError(
            f"cannot be captured: {error}{line}", where=path or "model", try_="plain tensors in and out of apply"
        )
    text = f"{type(error).__name__}: {error}"
    reason, remedy = next(
        ((r, t) for key, r, t in _REASONS if key in text),
        (f"torch.export failed with {text.strip().splitlines()[0][:200]}", _WHOLE),
    )
    return UnsupportedModelError(f"cannot be captured: {reason}{line}", where=path or "model", try_=remedy)


def _place(error: BaseException, shell: nn.Module) -> tuple[str, str]:
    """Path of the innermost module that was running, and the innermost source line that is the user's own."""
    path, file_line = "", ""
    link: BaseException | None = error
    while link is not None and not file_line:
        path, file_line = _innermost_module(link.__traceback__, shell), users_place(link)
        link = link.__cause__ or link.__context__
    return path, f" ({file_line})" if file_line else ""


def _innermost_module(tb: TracebackType | None, shell: nn.Module) -> str:
    paths = {id(m): name for name, m in shell.named_modules()}
    path = ""
    for frame, _ in traceback.walk_tb(tb):
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None  # "self", whatever its name
        if isinstance(module, nn.Module) and id(module) in paths and code.co_name not in ("__call__", "_call_impl"):
            path = paths[id(module)].removeprefix("model").removeprefix(".")
    return path


def refuse_effects(exported: torch.export.ExportedProgram, inputs: Iterable[str]) -> None:
    """Raise UnsupportedModelError for what a static graph would silently lose: changed inputs, autocast regions.

    inputs: the user's names of the input tensors, in order.
    """
    specs = exported.graph_signature.input_specs
    targets = {s.arg.name: str(s.target) for s in specs if s.target is not None}
    kinds = torch.export.graph_signature.InputKind
    buffers = {s.arg.name for s in specs if s.kind == kinds.BUFFER}
    given = dict(zip((s.arg.name for s in specs if s.kind == kinds.USER_INPUT), inputs, strict=True))
    for node in exported.graph.nodes:
        _refuse_out(node)
        changed = changed_root(node)
        _refuse_running_statistics(node)
        if changed is not None and changed.name not in buffers:
            name = targets.get(changed.name, "").removeprefix("model.")
            raise UnsupportedModelError(
                "a parameter is changed in forward" if name else "an input is changed in place",
                where=name or given[changed.name],
                try_="keep such state outside the model" if name else "work on a clone of the input",
            )
        if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            raise UnsupportedModelError(
                f"contains a {node.target.name()} region",
                where=module_path(node) or "model",
                try_="remove autocast regions from forward; precision is set in TrainSpec",
            )


def _refuse_out(node: fx.Node) -> None:
    """`out=` and ops that write into any argument but the first: a graph that is cut and reordered would lose it."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        written = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if written != [target._schema.arguments[0].name]:
            raise UnsupportedModelError(
                f"{target._schema.name} writes into its argument {written[-1]}",
                where=module_path(node) or "model",
                try_="use the result it returns",
            )


def _refuse_running_statistics(node: fx.Node) -> None:
    """batch_norm changes its running statistics unseen; recomputed or cut they would be others."""
    if node.target is torch.ops.aten.batch_norm.default and node.args[3] is not None and node.args[5] is True:
        raise UnsupportedModelError(
            "running statistics are changed in forward",
            where=module_path(node) or "model",
            try_="a norm over features (LayerNorm, RMSNorm), or eval() of this module",
        )


def module_path(node: fx.Node) -> str:
    """Innermost module of an exported node, without the shell's prefix."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).split("@")[0].removeprefix("model").removeprefix(".") if stack else ""


def changed_root(node: fx.Node) -> fx.Node | None:
    """The placeholder (buffer, parameter or input) that an in-place op changes, also through views; else None."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    root = node.args[0]
    while isinstance(root, fx.Node) and root.op == "call_function" and _is_view(root):
        root = root.args[0]
    return root if isinstance(root, fx.Node) and root.op == "placeholder" else None


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    aliases = [a.alias_info for a in target._schema.arguments]
    return bool(aliases) and aliases[0] is not None and not target._schema.is_mutable
