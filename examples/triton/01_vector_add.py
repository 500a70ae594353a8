"""The first kernel: programs, blocks, masks.

python examples/triton/01_vector_add.py
"""

import torch
import triton
import triton.language as tl
from compare import DEVICE, compare


@triton.jit
def vector_add(left, right, total, count, WIDTH: tl.constexpr):
    # Each program owns WIDTH neighbouring elements; the last one has fewer, which its mask says.
    position = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    exists = position < count
    a = tl.load(left + position, mask=exists)
    b = tl.load(right + position, mask=exists)
    tl.store(total + position, a + b, mask=exists)


def add(left: torch.Tensor, right: torch.Tensor, width: int = 4096) -> torch.Tensor:
    total = torch.empty_like(left)
    vector_add[(triton.cdiv(left.numel(), width),)](left, right, total, left.numel(), WIDTH=width)
    return total


def main() -> None:
    torch.manual_seed(0)
    for count in (1_000, 1_000_003, 8_388_608):
        left, right = torch.randn(2, count, device=DEVICE)
        compare(f"add, {count} elements", lambda a=left, b=right: add(a, b), lambda a=left, b=right: a + b, 0.0)


if __name__ == "__main__":
    main()
