"""GEMM + all-to-all: the rows of an expert's product return to the ranks that own them (MoE combine)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
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
def product_tile(a, b, tile_m, tile_n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """A tile of a @ b, [M, K] x [K, N], in float32."""
    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    a_tile = a + rows[:, None].to(tl.int64) * stride_am + depth[None, :] * stride_ak
    b_tile = b + depth[:, None] * stride_bk + columns[None, :].to(tl.int64) * stride_bn
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        inside = depth < K - k
        x = tl.load(a_tile, mask=(rows < M)[:, None] & inside[None, :], other=0.0)
        y = tl.load(b_tile, mask=inside[:, None] & (columns < N)[None, :], other=0.0)
        acc = tl.dot(x, y, acc)
        a_tile += BK * stride_ak
        b_tile += BK * stride_bk
    return acc


@triton.jit
def gemm_all_to_all_kernel(a, b, c, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
                           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """c = a @ b: a tile leaves for the owners of its rows when it is computed."""
    out = txl.epilogue(c, block_shape=[BM, BN])
    tile_m, tile_n = out.program_tile()
    acc = product_tile(a, b, tile_m, tile_n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, BM, BN, BK)
    out.store([tile_m * BM, tile_n * BN], acc)


#: For `triton-ext compile`.
SIGNATURES = {
    "gemm_all_to_all_kernel": dict.fromkeys(("a", "b"), "*fp32:16")
    | {"c": "all_to_all:2:fp32", "BM": 64, "BN": 128, "BK": 32}
    | dict.fromkeys(("M", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn"), "i32")
}


def simulated(rank: int, world: int) -> dict[str, Any]:
    """Arguments of the kernel on one virtual rank: small, and no size a multiple of a block."""
    m, k, n = 19, 20, 21
    generator = torch.Generator().manual_seed(rank)
    a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    plan = all_to_all((m, n), a.dtype)
    sizes = dict(zip(("M", "N", "K"), (m, n, k), strict=True))
    strides = dict(zip(("stride_am", "stride_ak", "stride_bk", "stride_bn"), (*a.stride(), *b.stride()), strict=True))
    return {"a": a, "b": b, "c": plan, **sizes, **strides, "BM": 8, "BN": 16, "BK": 16, "grid": plan.grid(8, 16)}


#: For `triton-ext simulate`.
SIMULATIONS = {"gemm_all_to_all_kernel": simulated}


def configuration(m: int, n: int, k: int, device: torch.device, between_hosts: bool = False) -> dict[str, int]:
    """The blocks of product_tile for a product of [m, k] and [k, n]."""
    if device.type != "cpu":
        return {"BM": 64, "BN": 128, "BK": 64}
    # Large tiles pack each operand fewer times; two rows of tiles at least, so that one travels meanwhile.
    rows, columns = triton.next_power_of_2(max(triton.cdiv(m, 2), 1)), triton.next_power_of_2(n)
    # Wide ones where there are rows enough to pay for packing the right operand, and columns enough to fill them.
    most_rows, most_columns = (256, 512) if rows >= 256 and triton.cdiv(n, 256) % 2 == 0 else (512, 256)
    if between_hosts and k <= 1024:  # there is more to send than to compute: let the first slice leave early
        most_rows = min(most_rows, max(rows // 4, 64))
    return {"BM": min(max(rows, 32), most_rows), "BN": min(max(columns, 32), most_columns), "BK": 128}


def run(a: torch.Tensor, b: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Launch the kernel with a plan over the product's shape, and return plan.result."""
    (m, k), n = a.shape, b.shape[1]
    constants = configuration(m, n, k, a.device, plan.is_between_hosts)
    grid = plan.grid(constants["BM"], constants["BN"])
    gemm_all_to_all_kernel[grid](a, b, plan, m, n, k, *a.stride(), *b.stride(), **constants)
    return plan.result


def gemm_all_to_all(
    a: torch.Tensor, b: torch.Tensor, *, group: GroupLike = None, plan: Plan | None = None
) -> torch.Tensor:
    """All-to-all of a @ b along the rows, overlapped with the product.

    a: [M, K], b: [K, N], both float32, float16 or bfloat16, with any strides; M and N are the same on all ranks. Rank r
    gets, of every rank's product, the rows that torch.chunk(product, world)[r] has, in rank order: [world * m_r, N].

    plan: tx.all_to_all((M, N), a.dtype); the result is then plan.result, valid until the plan's next run. Without it
    the result is a tensor of its own, and where torch's product and all-to-all were measured to be faster, they run
    instead (docs/schedules.md). Collective. Raises LaunchError for tensors that do not fit together.
    """
    if plan is not None:
        _check(a, b)
        if plan.shape != (a.shape[0], b.shape[1]):
            raise LaunchError(f"the plan is for a product of shape {plan.shape}, this is {(a.shape[0], b.shape[1])}")
        return run(a, b, plan)
    return _gemm_all_to_all(a, b, groups.resolve(group).name)


@torch.library.custom_op("triton_ext::gemm_all_to_all", mutates_args=())
def _gemm_all_to_all(a: torch.Tensor, b: torch.Tensor, group: str) -> torch.Tensor:
    _check(a, b)
    shape = (a.shape[0], b.shape[1])
    plan = plan_for(all_to_all, group, shape, a.dtype, device=a.device, computation=lambda: a @ b)
    return unfused(a, b, Library(group)) if plan.is_unfused_faster else run(a, b, plan).clone()


@_gemm_all_to_all.register_fake
def _(a: torch.Tensor, b: torch.Tensor, group: str) -> torch.Tensor:
    _check(a, b)
    ranks = groups.resolve(groups.named(group))
    start, end = owned(a.shape[0], ranks.size, ranks.rank)
    return a.new_empty(ranks.size * (end - start), b.shape[1])


def _check(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise LaunchError(f"gemm_all_to_all takes [M, K] and [K, N], got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != b.dtype or a.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise LaunchError(
            f"gemm_all_to_all takes two tensors of float32, float16 or bfloat16, got {a.dtype} and {b.dtype}"
        )


def unfused(a: torch.Tensor, b: torch.Tensor, comm: Any = dist) -> torch.Tensor:
    """The same with torch.mm and an all-to-all of torch.distributed: the reference, and what to be faster than.

    comm: torch.distributed, or what has its get_rank, get_world_size and all_to_all_single.
    """
    product = a @ b
    world, rank = comm.get_world_size(), comm.get_rank()
    sizes = [end - start for start, end in (owned(a.shape[0], world, r) for r in range(world))]
    result = product.new_empty(world * sizes[rank], b.shape[1])
    comm.all_to_all_single(result, product, [sizes[rank]] * world, sizes)
    return result
