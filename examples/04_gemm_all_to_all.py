"""The second half of a mixture-of-experts layer: an expert's product returns to the ranks that its tokens came from.

torchrun --nproc-per-node 2 examples/04_gemm_all_to_all.py
"""

import torch
import torch.distributed as dist

import triton_ext as tx
from triton_ext.ops.gemm import unfused

TOKENS, HIDDEN, WIDTH = 300, 512, 256  # tokens that each expert gets, a third of a block more than two blocks


def main() -> None:
    group = tx.init()
    torch.manual_seed(group.rank())
    activations = torch.randn(TOKENS, HIDDEN)  # sorted by the rank that the token came from
    expert = torch.randn(HIDDEN, WIDTH) / HIDDEN**0.5

    combined = tx.ops.gemm_all_to_all(activations, expert)
    torch.testing.assert_close(combined, unfused(activations, expert), rtol=1e-4, atol=1e-4)

    # It is an ordinary operator: inside torch.compile it is one node of the graph. A graph names the group.
    name = dist.group.WORLD.group_name

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.ops.triton_ext.gemm_all_to_all(x, w, name))

    torch.testing.assert_close(layer(activations, expert), torch.relu(combined))
    print(f"rank {group.rank()}: {tuple(combined.shape)} [tokens from here, width]", flush=True)
    tx.shutdown()


if __name__ == "__main__":
    main()
