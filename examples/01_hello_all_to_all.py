"""The smallest annotated kernel: every rank doubles a matrix, and the rows go to the ranks that own them.

torchrun --nproc-per-node 2 examples/01_hello_all_to_all.py
"""

import torch
import triton
import triton.language as tl

import triton_ext as tx
import triton_ext.language as txl


@triton.jit
def double(x, plan, M, N, BM: tl.constexpr, BN: tl.constexpr):
    # The epilogue is where this kernel's tiles go. The plan is an ordinary kernel argument.
    out = txl.epilogue(plan, block_shape=[BM, BN])

    # Ask for this program's tile instead of computing it from tl.program_id: tiles for other ranks come first, so that
    # they travel while the tiles that stay are still being computed.
    tile_m, tile_n = out.program_tile()

    # Ordinary Triton.
    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    value = 2 * tl.load(x + rows[:, None] * N + columns[None, :], mask=inside, other=0)

    # The annotated store, at logical coordinates of the matrix. Each row goes to the rank that owns it. There is no
    # peer, no address, no flag and no fence to write.
    out.store([tile_m * BM, tile_n * BN], value)


def main() -> None:
    group = tx.init()  # joins what torchrun started
    rank, world = group.rank(), group.size()

    M, N = 6, 4
    x = torch.full((M, N), float(rank + 1))

    # A plan is made once, by all ranks together. It owns the memory that tiles arrive in.
    plan = tx.all_to_all((M, N), torch.float32)

    # Running a kernel with it is not collective on the host: it is a launch. When the kernel is complete, so is the
    # all-to-all.
    double[plan.grid(2, 4)](x, plan, M, N, BM=2, BN=4)

    # This rank's rows of every rank's matrix, in rank order.
    print(f"rank {rank} of {world} has\n{plan.result}", flush=True)
    mine = len(torch.arange(M).chunk(world)[rank])
    expected = torch.arange(1, world + 1).repeat_interleave(mine).float() * 2
    assert torch.equal(plan.result, expected[:, None].expand(-1, N))
    tx.shutdown()


if __name__ == "__main__":
    main()
