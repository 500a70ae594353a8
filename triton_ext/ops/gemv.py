"""GEMV + all-reduce: a row-parallel linear layer at small batches (transformer decoding)."""

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
from ..runtime.collectives import GroupLike, all_reduce
from ..runtime.plans import Plan
from .library import Library
from .plan_cache import plan_for

MAX_BATCH = 64


@triton.jit
def linear_tile(x, w, tile_b, tile_n, B, N, K, stride_xb, stride_xk, stride_wn, stride_wk,
                BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """A tile of x @ w.T, [B, K] x [N, K], in float32."""
    batch = tile_b * BB + tl.arange(0, BB)
    rows = tile_n * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    w_tile = w + rows[:, None].to(tl.int64) * stride_wn + depth[None, :] * stride_wk
    x_tile = x + batch[:, None] * stride_xb + depth[None, :] * stride_xk
    if not DOT:
        # Sums in registers, one per element of a block of weights and row of the batch.
        sums = tl.zeros([BB, BN, BK], tl.float32)
        for k in range(0, K, BK):
            inside = depth < K - k
            weights = tl.load(w_tile, mask=(rows < N)[:, None] & inside[None, :], other=0.0)
            inputs = tl.load(x_tile, mask=(batch < B)[:, None] & inside[None, :], other=0.0)
            sums += weights.to(tl.float32)[None, :, :] * inputs.to(tl.float32)[:, None, :]
            w_tile += BK * stride_wk
            x_tile += BK * stride_xk
        acc = tl.sum(sums, axis=2)
    else:
        # The weights are the left operand: they are read once, in rows.
        sums = tl.zeros([BN, BB], tl.float32)
        for k in range(0, K, BK):
            inside = depth < K - k
            weights = tl.load(w_tile, mask=(rows < N)[:, None] & inside[None, :], other=0.0)
            inputs = tl.load(x_tile, mask=(batch < B)[:, None] & inside[None, :], other=0.0)
            sums = tl.dot(weights, tl.trans(inputs), sums)
            w_tile += BK * stride_wk
            x_tile += BK * stride_xk
        acc = tl.trans(sums)
    return acc


@triton.jit
def gemv_all_reduce_kernel(x, w, y, B, N, K, stride_xb, stride_xk, stride_wn, stride_wk,
                           BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """y = the sum over ranks of x @ w.T."""
    out = txl.epilogue(y, block_shape=[BB, BN])
    tile_b, tile_n = out.program_tile()
    acc = linear_tile(x, w, tile_b, tile_n, B, N, K, stride_xb, stride_xk, stride_wn, stride_wk, BB, BN, BK, DOT)
    out.store([tile_b * BB, tile_n * BN], acc)


#: For `triton-ext compile`.
SIGNATURES = {
    "gemv_all_reduce_kernel": dict.fromkeys(("x", "w"), "*fp32:16")
    | {"y": "all_reduce:2:fp32", "BB": 1, "BN": 16, "BK": 256, "DOT": False}
    | dict.fromkeys(("B", "N", "K", "stride_xb", "stride_xk", "stride_wn", "stride_wk"), "i32")
}


def simulated(rank: int, world: int) -> dict[str, Any]:
    """Arguments of the kernel on one virtual rank: small, and no size a multiple of a block."""
    batch, k, n = 3, 20, 37
    generator = torch.Generator().manual_seed(rank)
    x, w = torch.randn(batch, k, generator=generator), torch.randn(n, k, generator=generator)
    plan = all_reduce((batch, n), x.dtype)
    sizes = dict(zip(("B", "N", "K"), (batch, n, k), strict=True))
    strides = dict(zip(("stride_xb", "stride_xk", "stride_wn", "stride_wk"), (*x.stride(), *w.stride()), strict=True))
    constants = {"BB": 2, "BN": 8, "BK": 16, "DOT": False}
    return {"x": x, "w": w, "y": plan, **sizes, **strides, **constants, "grid": plan.grid(2, 8)}


#: For `triton-ext simulate`.
SIMULATIONS = {"gemv_all_reduce_kernel": simulated}


def configuration(batch: int, device: torch.device) -> dict[str, int | bool]:
    """The constants of linear_tile: the block's shape, and whether its product is a tl.dot."""
    bb = triton.next_power_of_2(batch)
    if device.type != "cpu":
        return {"BB": bb, "BN": 16, "BK": 256, "DOT": False} if bb <= 8 else {"BB": bb, "BN": 64, "BK": 64, "DOT": True}
    if bb <= 16:  # no more rows of weights at a time than the core prefetches, and whole lines of them
        return {"BB": bb, "BN": min(8, 64 // bb), "BK": 32 if bb <= 2 else 16, "DOT": False}
    return {"BB": bb, "BN": 64, "BK": 64, "DOT": True}


def run(x: torch.Tensor, w: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Launch the kernel with a plan over the output's shape, and return plan.result."""
    (batch, k), n = x.shape, w.shape[0]
    constants = configuration(batch, x.device)
    grid = plan.grid(constants["BB"], constants["BN"])
    gemv_all_reduce_kernel[grid](x, w, plan, batch, n, k, *x.stride(), *w.stride(), **constants)
    return plan.result


def gemv_all_reduce(
    x: torch.Tensor, w: torch.Tensor, *, group: GroupLike = None, plan: Plan | None = None
) -> torch.Tensor:
    """The sum over ranks of x @ w.T, on every rank: torch.nn.functional.linear whose input features are split.

    x: [B, K] or [K], B at most 64; w: [N, K]; float32, float16 or bfloat16, with any strides; K may differ among
    ranks. Returns [B, N] or [N] in x's dtype, bitwise the same on all ranks and in every run.

    plan: tx.all_reduce((B, N), x.dtype), with B = 1 for a vector; the result is then plan.result (of its shape), valid
    until the plan's next run. Without it, torch's linear and all-reduce run instead where they were measured to be
    faster (float32 only; docs/schedules.md). Collective. Raises LaunchError for tensors that do not fit together.
    """
    if plan is not None:
        rows = x if x.ndim == 2 else x.unsqueeze(0)
        _check(rows, w)
        if plan.shape != (rows.shape[0], w.shape[0]):
            raise LaunchError(f"the plan is for an output of {plan.shape}, this is {(rows.shape[0], w.shape[0])}")
        return run(rows, w, plan)
    return _gemv_all_reduce(x, w, groups.resolve(group).name)


@torch.library.custom_op("triton_ext::gemv_all_reduce", mutates_args=())
def _gemv_all_reduce(x: torch.Tensor, w: torch.Tensor, group: str) -> torch.Tensor:
    rows = x if x.ndim == 2 else x.unsqueeze(0)
    _check(rows, w)
    shape = (rows.shape[0], w.shape[0])
    plan = plan_for(all_reduce, group, shape, x.dtype, device=x.device, computation=lambda: F.linear(rows, w))
    # Plans sum in float32; libraries in the tensor's type.
    if plan.is_unfused_faster and x.dtype == torch.float32:
        result = unfused(rows, w, Library(group))
    else:
        result = run(rows, w, plan).clone()
    return result if x.ndim == 2 else result[0].clone()


@_gemv_all_reduce.register_fake
def _(x: torch.Tensor, w: torch.Tensor, group: str) -> torch.Tensor:
    _check(x if x.ndim == 2 else x.unsqueeze(0), w)
    return x.new_empty(*x.shape[:-1], w.shape[0])


def _check(x: torch.Tensor, w: torch.Tensor) -> None:
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise LaunchError(f"gemv_all_reduce takes [B, K] or [K], and [N, K], got {tuple(x.shape)} and {tuple(w.shape)}")
    if x.shape[0] > MAX_BATCH:
        raise LaunchError(f"gemv_all_reduce takes at most {MAX_BATCH} rows, got {x.shape[0]}: that is a GEMM")
    if x.dtype != w.dtype or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise LaunchError(
            f"gemv_all_reduce takes two tensors of float32, float16 or bfloat16, got {x.dtype} and {w.dtype}"
        )


def unfused(x: torch.Tensor, w: torch.Tensor, comm: Any = dist) -> torch.Tensor:
    """The same with torch and an all-reduce of torch.distributed: the reference, and what to be faster than.

    comm: torch.distributed, or what has its all_reduce.
    """
    result = F.linear(x, w)
    comm.all_reduce(result)
    return result
