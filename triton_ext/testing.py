"""For tests and for trying things out: virtual ranks, and what kernels under TRITON_EXT_SANITIZE=1 may access."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from .backends.cpu import ranges
from .errors import PlanError
from .runtime import groups, plans


class World:
    """`size` virtual ranks in this process: threads on a CPU, threads with a stream each on one GPU.

    hosts: number of the host of each rank, all on one if not given. Ranks of different hosts do not reach each other's
    memory: what they send goes through the transport between hosts.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu", hosts: Sequence[int] | None = None) -> None:
        if size < 1:
            raise PlanError(f"a world of {size} ranks: there has to be at least one")
        if hosts is not None and len(hosts) != size:
            raise PlanError(f"{len(hosts)} hosts for a world of {size} ranks: give one for each rank")
        self.size = size
        self.hosts = tuple(hosts or [0] * size)
        self.device = torch.device(device)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call function(rank, *args) on every rank at once, and return the results in rank order.

        Inside, plans default to the group of all virtual ranks. When all have ended, their plans are freed, and the
        first error is raised; a rank that raises makes those that wait for it raise too.
        """
        ranks = groups.ThreadRanks.world(self.hosts, self.device)
        results: list[Any] = [None] * self.size
        errors: list[tuple[int, BaseException]] = []

        def play(me: groups.ThreadRanks) -> None:
            with groups.as_virtual_rank(me):
                try:
                    if self.device.type == "cuda":
                        with torch.cuda.stream(torch.cuda.Stream(self.device)):
                            results[me.rank] = function(me.rank, *args)
                            torch.cuda.current_stream(self.device).synchronize()
                    else:
                        results[me.rank] = function(me.rank, *args)
                except BaseException as error:  # raised again in run()
                    errors.append((me.rank, error))
                    me.meeting.abort()
                    plans.free_all(me)

        with _one_compilation_at_a_time():
            threads = [threading.Thread(target=play, args=(me,), name=f"virtual rank {me.rank}") for me in ranks]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        plans.free_all(*ranks)
        if errors:
            rank, error = errors[0]
            error.add_note(f"on virtual rank {rank} of {self.size}")
            raise error
        return results


@contextmanager
def _one_compilation_at_a_time() -> Iterator[None]:
    """Python 3.11's ast.parse, with which a compilation begins, fails in threads (AST constructor recursion depth)."""
    compile_kernel = JITFunction._do_compile
    lock = threading.RLock()

    @functools.wraps(compile_kernel)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return compile_kernel(*args, **kwargs)

    JITFunction._do_compile = locked
    try:
        yield
    finally:
        JITFunction._do_compile = compile_kernel


def subgroup(ranks: list[int]) -> groups.ThreadRanks:
    """The group of some virtual ranks; called by its members only, like a member of torch.distributed.new_group."""
    me = groups.virtual_rank()
    if me is None:
        raise PlanError("subgroup() is for the virtual ranks of a World; use torch.distributed.new_group otherwise")
    return me.subgroup(ranks)


def addressable(tensor: torch.Tensor) -> torch.Tensor:
    """Let checked kernels access a tensor that they are not given, but find the address of; returns it.

    Every launch of a kernel under TRITON_EXT_SANITIZE=1 may access it as long as the tensor lives.
    """
    ranges.add(tensor, "an addressable tensor")
    return tensor


def uninitialized(tensor: torch.Tensor) -> torch.Tensor:
    """Let checked kernels report that they read what nobody has written of a tensor, and return it.

    From now on, what kernels under TRITON_EXT_SANITIZE=1 store there counts as written. A write of torch's ends this:
    everything counts as written from then on. Writes by anything else are not seen.
    """
    ranges.add_unwritten(tensor)
    return tensor
