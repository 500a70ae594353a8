"""What is measured: each operator at some shapes, in the variants that design.md compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

import triton_ext as tx
from kernels import embedding_kernel, gemm_kernel, gemv_kernel
from triton_ext.ops import embedding, gemm, gemv

Shape = dict[str, int]


@dataclass
class Case:
    """An operator at one shape, on this rank.

    variants: name -> a call; "fused" and the unfused ones return what the operator returns. reference: the result in
    float64. sent_bytes: what leaves this rank for others.
    """

    operator: str
    shape: Shape
    variants: dict[str, Callable[[], Any]]
    reference: Callable[[], torch.Tensor]
    sent_bytes: int
    free: Callable[[], None]


def _exchange(rows: torch.Tensor) -> torch.Tensor:
    """All-to-all along the first dimension, in float64."""
    parts = list(rows.chunk(dist.get_world_size()))
    arrived = [torch.empty_like(parts[dist.get_rank()]) for _ in parts]
    dist.all_to_all(arrived, [part.contiguous() for part in parts])
    return torch.stack(arrived)


def gemm_case(m: int, n: int, k: int, mpi: Any) -> Case:
    a, b = torch.randn(m, k), torch.randn(k, n)
    plan = tx.all_to_all((m, n), torch.float32)
    local = torch.empty(m, n)
    constants = gemm.configuration(m, n, k, a.device)

    def compute_only() -> torch.Tensor:
        grid = plan.grid(constants["BM"], constants["BN"])
        gemm_kernel[grid](a, b, local, m, n, k, *a.stride(), *b.stride(), **constants)
        return local

    variants: dict[str, Callable[[], Any]] = {
        "fused": lambda: tx.ops.gemm_all_to_all(a, b, plan=plan),
        "unfused_gloo": lambda: gemm.unfused(a, b),
        "compute_only": compute_only,
    }
    if mpi:
        variants["unfused_mpi"] = lambda: gemm.unfused(a, b, mpi)
    sent = prod((m, n)) * 4 * (dist.get_world_size() - 1) // dist.get_world_size()
    return Case(
        "gemm_all_to_all",
        {"M": m, "N": n, "K": k},
        variants,
        lambda: _exchange(a.double() @ b.double()).flatten(0, 1),
        sent,
        plan.free,
    )


def gemv_case(batch: int, n: int, k: int, mpi: Any) -> Case:
    """k: input features of all ranks together."""
    world = dist.get_world_size()
    x, w = torch.randn(batch, k // world), torch.randn(n, k // world)
    plan, one_shot = (tx.all_reduce((batch, n), torch.float32, shots=shots) for shots in (2, 1))
    local = torch.empty(batch, n)
    constants = gemv.configuration(batch, x.device)

    def compute_only() -> torch.Tensor:
        grid = plan.grid(constants["BB"], constants["BN"])
        gemv_kernel[grid](x, w, local, batch, n, k // world, *x.stride(), *w.stride(), **constants)
        return local

    def reference() -> torch.Tensor:
        total = x.double() @ w.double().T
        dist.all_reduce(total)
        return total

    variants: dict[str, Callable[[], Any]] = {
        "fused": lambda: tx.ops.gemv_all_reduce(x, w, plan=plan),
        "fused_one_shot": lambda: tx.ops.gemv_all_reduce(x, w, plan=one_shot),
        "unfused_gloo": lambda: gemv.unfused(x, w),
        "compute_only": compute_only,
    }
    if mpi:
        variants["unfused_mpi"] = lambda: gemv.unfused(x, w, mpi)
    sent = 2 * batch * n * 4 * (world - 1) // world
    shape = {"B": batch, "N": n, "K": k}

    def free() -> None:
        plan.free()
        one_shot.free()

    return Case("gemv_all_reduce", shape, variants, reference, sent, free)


def embedding_case(tables: int, samples: int, dim: int, lookups: int, mpi: Any, rows: int = 10_000) -> Case:
    """tables: of each rank. lookups: of each bag."""
    weight = torch.randn(tables * rows, dim)
    starts = torch.arange(tables) * rows
    indices = torch.randint(0, rows, (tables * samples * lookups,))
    offsets = (torch.arange(tables * samples) * lookups).view(tables, samples)
    arguments = (weight, starts, indices, offsets)
    plan = tx.all_to_all((samples, tables, dim), torch.float32, split_dim=0, concat_dim=1)
    local = torch.empty(samples, tables, dim)
    constants = embedding.configuration(dim, weight.device)

    def compute_only() -> torch.Tensor:
        grid = plan.grid(constants["BB"], 1, constants["BD"])
        embedding_kernel[grid](*arguments, local, samples, tables, dim, indices.numel(), dim, MEAN=False, **constants)
        return local

    def reference() -> torch.Tensor:
        where = indices + starts.repeat_interleave(samples * lookups)
        pooled = torch.zeros(tables * samples, dim, dtype=torch.float64)
        for i in range(lookups):
            pooled += weight[where[i::lookups]]
        arrived = _exchange(pooled.view(tables, samples, dim).transpose(0, 1).contiguous())
        return arrived.transpose(0, 1).flatten(1, 2)

    variants: dict[str, Callable[[], Any]] = {
        "fused": lambda: tx.ops.embedding_all_to_all(*arguments, plan=plan),
        "unfused_gloo": lambda: embedding.unfused(*arguments),
        "compute_only": compute_only,
    }
    if mpi:
        variants["unfused_mpi"] = lambda: embedding.unfused(*arguments, comm=mpi)
    sent = local.numel() * 4 * (dist.get_world_size() - 1) // dist.get_world_size()
    shape = {"tables": tables, "samples": samples, "D": dim, "lookups": lookups}
    return Case("embedding_all_to_all", shape, variants, reference, sent, plan.free)


Make = Callable[[Any], Case]

SHORT: list[Make] = [
    lambda mpi: gemm_case(1024, 1024, 1024, mpi),
    lambda mpi: gemv_case(1, 8192, 8192, mpi),
    lambda mpi: embedding_case(64, 512, 64, 32, mpi),
]

#: Between hosts.
NET: list[Make] = [
    *[lambda mpi, k=k: gemm_case(1024, 1024, k, mpi) for k in (512, 1024, 2048, 8192)],
    lambda mpi: embedding_case(64, 2048, 64, 32, mpi),
    *[lambda mpi, b=b: gemv_case(b, 8192, 8192, mpi) for b in (1, 2, 4, 8, 16)],
]

SWEEP: list[Make] = [
    *[lambda mpi, k=k: gemm_case(1024, 1024, k, mpi) for k in (256, 512, 1024, 2048)],
    *[lambda mpi, m=m: gemm_case(m, 1024, 1024, mpi) for m in (256, 4096)],
    *[lambda mpi, b=b: gemv_case(b, 8192, 8192, mpi) for b in (1, 2, 4, 8, 16)],
    *[lambda mpi, n=n: gemv_case(1, n, n, mpi) for n in (2048, 4096)],
    *[lambda mpi, s=s: embedding_case(64, s, 64, 32, mpi) for s in (512, 2048)],
    lambda mpi: embedding_case(64, 2048, 64, 8, mpi),
    lambda mpi: embedding_case(16, 2048, 128, 32, mpi),
]
