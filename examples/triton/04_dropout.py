"""Random numbers: Philox gives the n-th number of a seed, so that a mask is made again rather than kept.

python examples/triton/04_dropout.py
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from compare import DEVICE, compare


@triton.jit
def drop(x, result, count, chance, seed, WIDTH: tl.constexpr):
    position = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    exists = position < count
    # Element i always sees number i of the sequence, however the work is cut into blocks.
    kept = tl.rand(seed, position) >= chance
    value = tl.load(x + position, mask=exists)
    tl.store(result + position, tl.where(kept, value / (1 - chance), 0.0), mask=exists)


def masked(x: torch.Tensor, chance: float, seed: int, width: int = 1024) -> torch.Tensor:
    x = x.contiguous()
    result = torch.empty_like(x)
    drop[(triton.cdiv(x.numel(), width),)](x, result, x.numel(), chance, seed, WIDTH=width)
    return result


class Dropout(torch.autograd.Function):
    """Remembers a seed for the backward pass, where others remember a mask as large as the input."""

    @staticmethod
    def forward(ctx, x, chance, seed):
        ctx.chance, ctx.seed = chance, seed
        return masked(x, chance, seed)

    @staticmethod
    def backward(ctx, gradient):
        return masked(gradient, ctx.chance, ctx.seed), None, None


def dropout(x: torch.Tensor, chance: float, seed: int) -> torch.Tensor:
    return Dropout.apply(x, chance, seed)


def main() -> None:
    torch.manual_seed(0)
    chance, seed = 0.3, 1234
    x = torch.randn(1_000_003, device=DEVICE, requires_grad=True)
    result = dropout(x, chance, seed)
    kept = result != 0
    share = kept.double().mean().item()
    assert abs(share - (1 - chance)) < 0.005
    print(f"{share:.4f} of the elements are kept, where {1 - chance} are expected")
    assert torch.equal(result, dropout(x, chance, seed))
    assert not torch.equal(kept, dropout(x, chance, seed + 1) != 0)
    print("the same seed drops the same elements, the next one drops others")
    result.sum().backward()
    assert torch.equal(x.grad != 0, kept)
    print("the gradient has zeros where the result has them")
    data = x.detach()
    compare("given the mask", lambda: masked(data, chance, seed), lambda: data * kept / (1 - chance), 1e-5)
    ours, theirs = (
        (lambda: (dropout(data, chance, seed) != 0).float().mean()),
        (lambda: (F.dropout(data, chance) != 0).float().mean()),
    )
    compare("kept on average, against torch's dropout", ours, theirs, 5e-3)


if __name__ == "__main__":
    main()
