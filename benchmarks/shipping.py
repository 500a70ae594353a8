"""How much a computation is slowed down while the proxy sends and receives on the same core."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import triton_ext as tx
from cases import gemm_case
from kernels import copy_kernel
from measure import Link, record

_SECONDS = 0.25  # of traffic in each direction


def measure(runs: int, link: Link) -> dict[str, Any]:
    """A record of variant "compute_while_shipping", with its slow-down against the same kernel in silence. Collective.

    Each rank broadcasts to all others what the link needs a while for. A thread launches these kernels, and waits in
    the receiving ones, while this one runs GEMMs. Only GEMMs that began and ended during the traffic count.
    """
    columns = 1024
    rows = max(1, int(_SECONDS * link.bytes_per_s / (4 * columns)))
    values = torch.randn(rows, columns)
    plans = [tx.broadcast((rows, columns), torch.float32, root=root) for root in range(dist.get_world_size())]
    case = gemm_case(1024, 1024, 1024, None)
    compute = case.variants["compute_only"]
    me = dist.get_rank()
    order = [plans[me], *plans[:me], *plans[me + 1 :]]  # its own first: it only sends

    def ship() -> None:
        for plan in order:
            copy_kernel[plan.grid(16, columns)](values, plan, rows, columns, BM=16, BN=columns)

    ship()
    compute()
    silent: list[float] = []
    busy: list[float] = []
    for _ in range(runs):
        dist.barrier()
        silent.append(_seconds(compute))
        dist.barrier()
        traffic = threading.Thread(target=ship)
        traffic.start()
        while traffic.is_alive():
            seconds = _seconds(compute)
            if traffic.is_alive():
                busy.append(seconds)
        traffic.join()
    slowdown = torch.tensor([statistics.median(busy) / statistics.median(silent)], dtype=torch.float64)
    dist.all_reduce(slowdown, dist.ReduceOp.MAX)
    found = record(case, "compute_while_shipping", busy, None, link) | {"slowdown": float(slowdown) - 1}
    case.free()
    for plan in plans:
        plan.free()
    return found


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
