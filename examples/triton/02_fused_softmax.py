"""A fused operator: each row is read once and written once, whatever happens to it in between.

python examples/triton/02_fused_softmax.py
"""

import torch
import triton
import triton.language as tl
from compare import DEVICE, compare


@triton.jit
def softmax_rows(scores, result, rows, columns, score_stride, result_stride, WIDTH: tl.constexpr):
    # A limited number of programs shares the rows: each goes on with the row that is one grid further.
    column = tl.arange(0, WIDTH)
    exists = column < columns
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        # What is missing in a row is -inf: it neither is the maximum nor adds to the sum.
        x = tl.load(scores + row * score_stride + column, mask=exists, other=-float("inf")).to(tl.float32)
        weight = tl.exp(x - tl.max(x, axis=0))
        share = weight / tl.sum(weight, axis=0)
        tl.store(result + row * result_stride + column, share.to(result.dtype.element_ty), mask=exists)


def softmax(scores: torch.Tensor, programs: int = 1024) -> torch.Tensor:
    """Along the last dimension of a matrix whose rows are contiguous."""
    rows, columns = scores.shape
    result = torch.empty_like(scores, memory_format=torch.contiguous_format)
    softmax_rows[(min(rows, programs),)](
        scores, result, rows, columns, scores.stride(0), result.stride(0), WIDTH=triton.next_power_of_2(columns)
    )
    return result


def main() -> None:
    torch.manual_seed(0)
    for rows, columns in ((1823, 781), (4096, 1024), (1024, 4096)):
        scores = 3 * torch.randn(rows, columns, device=DEVICE)
        name = f"softmax, {rows} x {columns}"
        compare(name, lambda x=scores: softmax(x), lambda x=scores: torch.softmax(x, 1), 1e-6)


if __name__ == "__main__":
    main()
