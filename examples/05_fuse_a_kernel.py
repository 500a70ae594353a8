"""From a kernel that you have to a fused one: both are here, the diff is printed, and they are compared.

torchrun --nproc-per-node 2 examples/05_fuse_a_kernel.py
"""

import difflib
import inspect

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import triton_ext as tx
import triton_ext.language as txl


@triton.jit
def row_softmax(x, y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    tile = tl.program_id(0)
    rows = tile * BM + tl.arange(0, BM)
    columns = tl.arange(0, BN)
    places = rows[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    scores = tl.load(x + places, mask=inside, other=-float("inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    weights = weights / tl.sum(weights, axis=1)[:, None]
    tl.store(y + places, weights, mask=inside)


@triton.jit
def row_softmax_all_gather(x, y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    out = txl.epilogue(y, block_shape=[BM, BN])
    tile, _ = out.program_tile()
    rows = tile * BM + tl.arange(0, BM)
    columns = tl.arange(0, BN)
    places = rows[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    scores = tl.load(x + places, mask=inside, other=-float("inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    weights = weights / tl.sum(weights, axis=1)[:, None]
    out.store([tile * BM, 0], weights)


def main() -> None:
    group = tx.init()
    M, N, BM, BN = 100, 60, 8, 64
    torch.manual_seed(group.rank())
    x = torch.randn(M, N)

    y = torch.empty(M, N)
    row_softmax[(triton.cdiv(M, BM),)](x, y, M, N, BM=BM, BN=BN)
    gathered = [torch.empty_like(y) for _ in range(group.size())]
    dist.all_gather(gathered, y)

    plan = tx.all_gather((M, N), torch.float32)
    row_softmax_all_gather[plan.grid(BM, BN)](x, plan, M, N, BM=BM, BN=BN)
    assert torch.equal(plan.result, torch.cat(gathered))

    if group.rank() == 0:
        sources = [inspect.getsource(kernel.fn).splitlines() for kernel in (row_softmax, row_softmax_all_gather)]
        print("\n".join(difflib.unified_diff(*sources, "plain", "fused", n=0, lineterm="")), flush=True)
    tx.shutdown()


if __name__ == "__main__":
    main()
