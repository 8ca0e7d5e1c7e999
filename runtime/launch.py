"""Starting ranks: n local gloo processes for tests, `verify` and the demo; torchrun's processes otherwise."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankTimeoutError", "RemoteTracebackError", "join_torchrun", "run_ranks"]

# Imported once in the fork server, so that a rank starts in a fraction of a second. A missing one is skipped.
_PRELOAD = (
    "torch",
    "torch.distributed.pipelining",
    "torch.distributed.device_mesh",
    "torch.export",
    "torch._dynamo",
    "autopar.verify",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)


class RemoteTracebackError(Exception):
    """Where in the failing rank an error came from; the cause of what `run_ranks` raises."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"\n--- rank {rank} ---\n{text}")


class RankTimeoutError(Exception):
    """Not all ranks finished in time."""


def run_ranks(
    n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0, once: Callable[[], Any] | None = None
) -> list[Any]:
    """Run `fn(*args)` on `n` new gloo processes; return its results in rank order.

    Inside `fn` the default process group exists (`dist.get_rank()`). `fn` is a module-level function; arguments and
    results are pickled, so ranks share no memory. If a rank fails, its exception is raised here, with the remote
    traceback as cause, as soon as it happens; RankTimeoutError after `timeout_s`. No process outlives the call.

    once: what it returns is the first argument of `fn`, never pickled. It runs before the process group exists, in one
    process that ranks are forked from: capturing a small model is most of the work of a rank. It runs no backward:
    autograd's threads do not survive a fork. Neither do the drivers of accelerators; beside one, each rank calls it.
    """
    deadline = time.monotonic() + timeout_s
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    payload = pickle.dumps((fn, args, once))
    if once is None or torch.accelerator.is_available():
        return _run(context, n, _Call(payload), deadline)
    reader, writer = context.Pipe(duplex=False)
    leader = context.Process(target=_lead, args=(n, payload, writer, deadline))
    leader.start()
    writer.close()
    try:
        # Its ranks are late first, and it says which; it is late itself only before it has any.
        results: list[Any] = _collect([reader], deadline + 10, "what ranks share")[0]
        return results
    finally:
        leader.kill()  # ranks end with it
        leader.join()
        reader.close()


def _run(context: Any, n: int, call: Callable[[], Any], deadline: float) -> list[Any]:
    processes: list[BaseProcess] = []
    readers: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="autopar-ranks-") as folder:
        store = str(Path(folder) / "store")
        try:
            for rank in range(n):
                reader, writer = context.Pipe(duplex=False)
                arguments = (rank, n, store, call, writer, max(1.0, deadline - time.monotonic()))
                process: BaseProcess = context.Process(target=_rank_main, args=arguments, daemon=True)
                process.start()
                writer.close()
                processes.append(process)
                readers.append(reader)
            return _collect(readers, deadline)
        finally:
            for process in processes:
                if process.exitcode is None:
                    process.kill()
                process.join()
            for reader in readers:
                reader.close()


class _Call:
    """`fn` as a rank runs it, from its pickled form."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def __call__(self) -> Any:
        fn, args, once = pickle.loads(self._payload)
        return fn(*args) if once is None else fn(once(), *args)


def _lead(n: int, payload: bytes, writer: Connection, deadline: float) -> None:
    """Prepare what ranks share, and fork them."""
    torch.set_num_threads(1)  # threads would be lost in forks
    try:
        fn, args, once = pickle.loads(payload)
        call = partial(fn, once(), *args)
        gc.freeze()  # to look through what is shared would copy it, page by page
        reply = pickle.dumps((True, _run(multiprocessing.get_context("fork"), n, call, deadline), ""))
    except Exception as error:  # noqa: BLE001 - the border of the process: whatever it was goes to the parent
        text = str(error.__cause__) if isinstance(error.__cause__, RemoteTracebackError) else traceback.format_exc()
        reply = pickle.dumps((False, _portable(error), text))
    with contextlib.suppress(BrokenPipeError):
        writer.send_bytes(reply)
    writer.close()


def _collect(readers: list[Connection], deadline: float, what: str = "") -> list[Any]:
    started = time.monotonic()
    results: dict[int, Any] = {}
    pending = {reader: rank for rank, reader in enumerate(readers)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = what or f"ranks {sorted(pending.values())} of {len(readers)}"
            raise RankTimeoutError(f"{late} did not finish within {deadline - started:.3g} s")
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = pending.pop(reader)
            try:
                ok, value, text = pickle.loads(reader.recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a word (killed, or out of memory)") from None
            if not ok:
                raise value from RemoteTracebackError(rank, text)
            results[rank] = value
    return [results[rank] for rank in range(len(readers))]


def _end_with_parent() -> None:
    """Leave no rank behind when the caller is killed; it would wait for its peers until the time-out."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _rank_main(rank: int, n: int, store: str, call: Callable[[], Any], writer: Connection, timeout_s: float) -> None:
    gc.freeze()  # of the process this one was forked from
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // n))
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, n),  # type: ignore[attr-defined]
            rank=rank,
            world_size=n,
            timeout=timedelta(seconds=timeout_s),
        )
        reply = pickle.dumps((True, call(), ""))
        dist.barrier()  # a rank that leaves early would close connections others still read from
    except Exception as error:  # noqa: BLE001 - the border of the process: whatever it was goes to the parent
        reply = pickle.dumps((False, _portable(error), traceback.format_exc()))
    with contextlib.suppress(BrokenPipeError):
        writer.send_bytes(reply)
    writer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _portable(error: Exception) -> Exception:
    """The error itself if it survives pickling, else a RuntimeError with its text."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - any user exception may fail to pickle in its own way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error if isinstance(copy, type(error)) else RuntimeError(f"{type(error).__name__}: {error}")


def join_torchrun() -> torch.device:
    """The device of this process; joins the process group if torchrun started us and the user did not join already.

    With a visible GPU the device is `cuda:LOCAL_RANK` and the backend NCCL (gloo for CPU tensors), else CPU and gloo.
    A process that torchrun did not start stays alone.
    """
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if torch.cuda.is_available():
        device = torch.device(
            "cuda", int(os.environ.get("LOCAL_RANK", "0")) if launched else torch.cuda.current_device()
        )
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if launched and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if dist.is_initialized() and "nccl" not in str(dist.get_backend_config()):
        return torch.device("cpu")
    return device
