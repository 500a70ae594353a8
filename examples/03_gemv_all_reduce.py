"""A row-parallel linear layer in decoding: each rank has a part of the input features, and all need the sum.

torchrun --nproc-per-node 2 examples/03_gemv_all_reduce.py
"""

import torch
import torch.distributed as dist

import triton_ext as tx
from triton_ext.ops.gemv import unfused

IN_FEATURES, OUT_FEATURES, TOKENS = 4096, 4096, 20


def main() -> None:
    group = tx.init()
    rank, world = group.rank(), group.size()
    torch.manual_seed(0)
    weight = torch.randn(OUT_FEATURES, IN_FEATURES).chunk(world, dim=1)[rank].contiguous()

    # One plan serves all steps: its memory, and the address of its result, stay.
    plan = tx.all_reduce((1, OUT_FEATURES), torch.float32)
    state = torch.randn(1, IN_FEATURES)
    for _ in range(TOKENS):
        x = state.chunk(world, dim=1)[rank]
        y = tx.ops.gemv_all_reduce(x, weight, plan=plan)  # is plan.result: valid until the next step
        torch.testing.assert_close(y, unfused(x.contiguous(), weight), rtol=1e-4, atol=1e-2)
        state = torch.tanh(y)

    # The sum is formed in rank order, whatever the order of arrival: bitwise the same everywhere.
    states = [torch.empty_like(state) for _ in range(world)]
    dist.all_gather(states, state)
    assert all(torch.equal(state, other) for other in states)
    print(f"rank {rank}: {TOKENS} steps, the same state on all {world} ranks", flush=True)
    tx.shutdown()


if __name__ == "__main__":
    main()
