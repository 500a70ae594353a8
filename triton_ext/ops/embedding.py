"""Pooled embeddings + all-to-all: tables are spread over ranks, samples too (DLRM)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl

import triton_ext.language as txl

from ..errors import LaunchError
from ..runtime import groups
from ..runtime.collectives import GroupLike, all_to_all
from ..runtime.layout import owned
from ..runtime.plans import Plan
from .library import Library
from .plan_cache import plan_for


@triton.jit
def pooled_tile(weight, table_starts, indices, offsets, tile_b, table, tile_d, B, T, D, n_indices, stride_w,
                MEAN: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """The sum or mean of the rows of one table that BB bags name, in float32: [BB, BD]."""
    samples = tile_b * BB + tl.arange(0, BB)
    columns = tile_d * BD + tl.arange(0, BD)
    inside = (samples < B) & (table < T)
    bags = table.to(tl.int64) * B + samples
    starts = tl.load(offsets + bags, mask=inside, other=0)
    behind = tl.where(inside & (bags + 1 < tl.cast(T, tl.int64) * B), bags + 1, 0)
    ends = tl.load(offsets + behind, mask=behind > 0, other=n_indices)
    counts = tl.where(inside, ends - starts, 0)
    rows = weight + tl.load(table_starts + table, mask=table < T, other=0) * stride_w
    acc = tl.zeros([BB, BD], tl.float32)
    for i in range(0, tl.max(counts, axis=0)):
        in_bag = i < counts
        row = tl.load(indices + starts + i, mask=in_bag, other=0)
        acc += tl.load(
            rows + row[:, None] * stride_w + columns[None, :],
            mask=in_bag[:, None] & (columns < D)[None, :],
            other=0.0,
        ).to(tl.float32)
    if MEAN:
        acc = acc / tl.maximum(counts, 1).to(tl.float32)[:, None]
    return acc


@triton.jit
def embedding_all_to_all_kernel(weight, table_starts, indices, offsets, pooled, B, T, D, n_indices, stride_w,
                                MEAN: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """pooled[b, t] = the pooled vector of bag (t, b): a tile of BB samples leaves for their owner."""
    out = txl.epilogue(pooled, block_shape=[BB, 1, BD])
    tile_b, table, tile_d = out.program_tile()
    acc = pooled_tile(
        weight, table_starts, indices, offsets, tile_b, table, tile_d, B, T, D, n_indices, stride_w, MEAN, BB, BD
    )
    out.store([tile_b * BB, table, tile_d * BD], acc[:, None, :])


#: For `triton-ext compile`.
SIGNATURES = {
    "embedding_all_to_all_kernel": {"weight": "*fp32:16", "pooled": "all_to_all:3:fp32"}
    | {"MEAN": False, "BB": 32, "BD": 64}
    | dict.fromkeys(("table_starts", "indices", "offsets"), "*i64:16")
    | dict.fromkeys(("B", "T", "D", "n_indices", "stride_w"), "i32")
}


def simulated(rank: int, world: int) -> dict[str, Any]:
    """Arguments of the kernel on one virtual rank: small, bags of 0 to 3 look-ups, one more table on odd ranks."""
    tables, samples, dim, rows = 2 + rank % 2, 11, 12, 7
    generator = torch.Generator().manual_seed(rank)
    weight = torch.randn(tables * rows, dim, generator=generator)
    counts = torch.randint(0, 4, (tables * samples,), generator=generator)
    offsets = (counts.cumsum(0) - counts).view(tables, samples)
    indices = torch.randint(0, rows, (int(counts.sum()),), generator=generator)
    plan = all_to_all((samples, tables, dim), weight.dtype, split_dim=0, concat_dim=1)
    tensors = {"weight": weight, "table_starts": torch.arange(tables) * rows, "indices": indices, "offsets": offsets}
    sizes = {"B": samples, "T": tables, "D": dim, "n_indices": indices.numel(), "stride_w": weight.stride(0)}
    constants = {"MEAN": False, "BB": 4, "BD": 16}
    return {**tensors, "pooled": plan, **sizes, **constants, "grid": plan.grid(4, 1, 16)}


#: For `triton-ext simulate`.
SIMULATIONS = {"embedding_all_to_all_kernel": simulated}


def configuration(dim: int, device: torch.device) -> dict[str, int]:
    """The block of pooled_tile: samples and columns."""
    return {
        "BB": 4 if device.type == "cpu" else 32,
        "BD": min(triton.next_power_of_2(max(dim, 1)), 128),
    }


def run(
    weight: torch.Tensor,
    table_starts: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    mode: str,
    plan: Plan,
) -> torch.Tensor:
    """Launch the kernel with a plan over [B, T, D], and return plan.result."""
    (tables, samples), dim = offsets.shape, weight.shape[1]
    constants = configuration(dim, weight.device)
    grid = plan.grid(constants["BB"], 1, constants["BD"])
    embedding_all_to_all_kernel[grid](
        weight, table_starts, indices, offsets, plan, samples, tables, dim, indices.numel(), weight.stride(0),
        MEAN=mode == "mean", **constants,
    )  # fmt: skip
    return plan.result


def embedding_all_to_all(
    weight: torch.Tensor,
    table_starts: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    *,
    mode: str = "sum",
    total_tables: int | None = None,
    group: GroupLike = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Pooled look-ups in this rank's tables for all samples; the vectors go to the ranks that own the samples.

    weight: [rows of all T tables of this rank, D], float32, float16 or bfloat16, rows contiguous.
    table_starts: int64[T], the first row of each table.
    indices: int64[n], rows within a table; bags one after another, table by table.
    offsets: int64[T, B], where each bag begins in indices, ascending, as in torch.nn.EmbeddingBag; a bag ends where
        the next one begins, the last at n. B and D are the same on all ranks, T may differ.
    mode: "sum" or "mean"; an empty bag gives zeros.
    total_tables: of all ranks together; needed where ranks have different numbers of tables.

    Returns [samples of this rank, tables of all ranks, D]: samples as torch.chunk splits them, tables in rank order,
    the layout that the interaction layer reads. Indices are not checked against the tables' sizes.

    plan: tx.all_to_all((B, T, D), weight.dtype, split_dim=0, concat_dim=1); the result is then plan.result, valid until
    the plan's next run. Without it, torch's embedding_bag and all-to-all run instead where they were measured to be
    faster (docs/schedules.md). Collective. Raises LaunchError for tensors that do not fit together.
    """
    if plan is not None:
        _check(weight, table_starts, indices, offsets, mode)
        shape = (offsets.shape[1], offsets.shape[0], weight.shape[1])
        if plan.shape != shape:
            raise LaunchError(f"the plan is for pooled vectors of shape {plan.shape}, these are {shape}")
        return run(weight, table_starts, indices, offsets, mode, plan)
    ranks = groups.resolve(group)
    total = ranks.size * offsets.shape[0] if total_tables is None else total_tables
    return _embedding_all_to_all(weight, table_starts, indices, offsets, mode, ranks.name, total)


@torch.library.custom_op("triton_ext::embedding_all_to_all", mutates_args=())
def _embedding_all_to_all(
    weight: torch.Tensor,
    table_starts: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    mode: str,
    group: str,
    total_tables: int,
) -> torch.Tensor:
    _check(weight, table_starts, indices, offsets, mode)
    shape = (offsets.shape[1], offsets.shape[0], weight.shape[1])
    tensors = (weight, table_starts, indices, offsets)
    plan = plan_for(
        all_to_all,
        group,
        shape,
        weight.dtype,
        split_dim=0,
        concat_dim=1,
        device=weight.device,
        computation=lambda: pooled(*tensors, mode),
    )
    result = unfused(*tensors, mode, Library(group)) if plan.is_unfused_faster else run(*tensors, mode, plan).clone()
    if result.shape[1] != total_tables:
        raise LaunchError(
            f"the ranks have {result.shape[1]} tables together, not {total_tables}: pass total_tables={result.shape[1]}"
        )
    return result


@_embedding_all_to_all.register_fake
def _(
    weight: torch.Tensor,
    table_starts: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    mode: str,
    group: str,
    total_tables: int,
) -> torch.Tensor:
    _check(weight, table_starts, indices, offsets, mode)
    ranks = groups.resolve(groups.named(group))
    start, end = owned(offsets.shape[1], ranks.size, ranks.rank)
    return weight.new_empty(end - start, total_tables, weight.shape[1])


def _check(
    weight: torch.Tensor, table_starts: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, mode: str
) -> None:
    shapes = f"weight {tuple(weight.shape)}, table_starts {tuple(table_starts.shape)}, "
    shapes += f"indices {tuple(indices.shape)}, offsets {tuple(offsets.shape)}"
    if weight.ndim != 2 or offsets.ndim != 2 or indices.ndim != 1 or table_starts.shape != offsets.shape[:1]:
        raise LaunchError(f"embedding_all_to_all takes [rows, D], [T], [n] and [T, B], got {shapes}")
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise LaunchError(f"embedding_all_to_all takes weights of float32, float16 or bfloat16, got {weight.dtype}")
    for name, tensor in (("table_starts", table_starts), ("indices", indices), ("offsets", offsets)):
        if tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise LaunchError(f"embedding_all_to_all: {name} must be contiguous int64, is {tensor.dtype}")
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        raise LaunchError(f"embedding_all_to_all: rows of weight must be contiguous, strides are {weight.stride()}")
    if mode not in ("sum", "mean"):
        raise LaunchError(f"embedding_all_to_all: mode={mode!r} is neither 'sum' nor 'mean'")


def unfused(
    weight: torch.Tensor,
    table_starts: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    mode: str = "sum",
    comm: Any = dist,
) -> torch.Tensor:
    """The same with an embedding_bag per table and an all-to-all of torch.distributed: the reference, and what to be
    faster than. All ranks have the same number of tables here.

    comm: torch.distributed, or what has its get_rank, get_world_size and all_to_all_single.
    """
    tables, samples = offsets.shape
    dim = weight.shape[1]
    vectors = pooled(weight, table_starts, indices, offsets, mode)
    world, rank = comm.get_world_size(), comm.get_rank()
    sizes = [end - start for start, end in (owned(samples, world, r) for r in range(world))]
    arrived = vectors.new_empty(world * sizes[rank], tables, dim)
    comm.all_to_all_single(arrived, vectors, [sizes[rank]] * world, sizes)
    return arrived.view(world, sizes[rank], tables, dim).transpose(0, 1).reshape(sizes[rank], world * tables, dim)


def pooled(
    weight: torch.Tensor, table_starts: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, mode: str
) -> torch.Tensor:
    """[B, T, D]: an embedding_bag per table."""
    tables, samples = offsets.shape
    rows = [*table_starts.tolist(), weight.shape[0]]
    bounds = [*offsets[:, 0].tolist(), indices.numel()] if samples else [0] * (tables + 1)
    vectors = [
        F.embedding_bag(
            indices[bounds[table] : bounds[table + 1]],
            weight[rows[table] : rows[table + 1]],
            offsets[table] - bounds[table],
            mode=mode,
        )
        for table in range(tables)
    ]
    return torch.stack(vectors, 1) if tables else weight.new_empty(samples, 0, weight.shape[1])
