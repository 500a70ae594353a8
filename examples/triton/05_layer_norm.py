"""Layer normalisation as an autograd function, with reductions along rows and, for the weights, along columns.

python examples/triton/05_layer_norm.py
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from compare import DEVICE, ON_CPU, compare

GROUPS = 32  # of rows, each summed by one program
SPAN = 256 if ON_CPU else 64  # columns that a program adds the groups of


@triton.jit
def normalise(x, weight, bias, y, means, scales, columns, eps, WIDTH: tl.constexpr):
    """One row: y = (x - mean) * scale * weight + bias, with scale = 1 / standard deviation."""
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    exists = column < columns
    value = tl.load(x + row * columns + column, mask=exists, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=0) / columns
    centred = tl.where(exists, value - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / columns + eps)
    w = tl.load(weight + column, mask=exists).to(tl.float32)
    b = tl.load(bias + column, mask=exists).to(tl.float32)
    tl.store(y + row * columns + column, (centred * scale * w + b).to(y.dtype.element_ty), mask=exists)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)


@triton.jit
def differentiate(
    gradient, x, weight, means, scales, x_gradient, weight_parts, bias_parts, rows, columns, WIDTH: tl.constexpr
):
    """A group of rows: each row's gradient, and what the group adds to the gradients of weight and bias."""
    group, groups = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, WIDTH)
    exists = column < columns
    w = tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)
    of_weight = tl.zeros([WIDTH], tl.float32)
    of_bias = tl.zeros([WIDTH], tl.float32)
    for row in range(group, rows, groups):
        dy = tl.load(gradient + row * columns + column, mask=exists, other=0.0).to(tl.float32)
        value = tl.load(x + row * columns + column, mask=exists, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        unit = tl.where(exists, (value - tl.load(means + row)) * scale, 0.0)
        of_weight += dy * unit
        of_bias += dy
        # Shifting or stretching a row does not change its normal form: the gradient has no part along either.
        pull = dy * w
        shift = tl.sum(pull, axis=0) / columns
        stretch = tl.sum(pull * unit, axis=0) / columns
        dx = scale * (pull - shift - unit * stretch)
        tl.store(x_gradient + row * columns + column, dx.to(x_gradient.dtype.element_ty), mask=exists)
    tl.store(weight_parts + group * columns + column, of_weight, mask=exists)
    tl.store(bias_parts + group * columns + column, of_bias, mask=exists)


@triton.jit
def add_groups(parts, total, groups, columns, HEIGHT: tl.constexpr, SPAN: tl.constexpr):
    """SPAN columns of the groups' parts, added up."""
    column = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    group = tl.arange(0, HEIGHT)
    exists = (group < groups)[:, None] & (column < columns)[None, :]
    part = tl.load(parts + group[:, None] * columns + column[None, :], mask=exists, other=0.0)
    tl.store(total + column, tl.sum(part, axis=0).to(total.dtype.element_ty), mask=column < columns)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        x = x.contiguous()
        rows, columns = x.numel() // x.shape[-1], x.shape[-1]
        y = torch.empty_like(x)
        means, scales = torch.empty(2, rows, device=x.device)
        normalise[(rows,)](x, weight, bias, y, means, scales, columns, eps, WIDTH=triton.next_power_of_2(columns))
        ctx.save_for_backward(x, weight, bias, means, scales)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, weight, bias, means, scales = ctx.saved_tensors
        rows, columns = x.numel() // x.shape[-1], x.shape[-1]
        groups = min(rows, GROUPS)
        dx, dw, db = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
        weight_parts, bias_parts = torch.empty(2, groups, columns, device=x.device)
        differentiate[(groups,)](
            gradient.contiguous(), x, weight, means, scales, dx, weight_parts, bias_parts, rows, columns,
            WIDTH=triton.next_power_of_2(columns),
        )  # fmt: skip
        for parts, total in ((weight_parts, dw), (bias_parts, db)):
            add_groups[(triton.cdiv(columns, SPAN),)](parts, total, groups, columns, HEIGHT=GROUPS, SPAN=SPAN)
        return dx, dw, db, None


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Over the last dimension."""
    return LayerNorm.apply(x, weight, bias, eps)


def main() -> None:
    torch.manual_seed(0)
    for rows, columns in ((1000, 765), (4096, 1024)):
        x = (2 * torch.randn(rows, columns, device=DEVICE) + 1).requires_grad_()
        weight = torch.randn(columns, device=DEVICE, requires_grad=True)
        bias = torch.randn(columns, device=DEVICE, requires_grad=True)
        inputs = (x, weight, bias)
        y, expected = layer_norm(*inputs), F.layer_norm(x, (columns,), weight, bias)
        dy = torch.randn_like(y)
        name = f"layer norm, {rows} x {columns}"

        with torch.no_grad():
            compare(
                f"{name}, forward",
                lambda given=inputs: layer_norm(*given),
                lambda given=inputs, n=columns: F.layer_norm(given[0], (n,), *given[1:]),
                1e-4,
            )

        def gradients(result: torch.Tensor, given=inputs, dy=dy) -> torch.Tensor:
            return torch.cat([g.flatten() for g in torch.autograd.grad(result, given, dy, retain_graph=True)])

        compare(f"{name}, backward", lambda y=y: gradients(y), lambda y=expected: gradients(y), 1e-3)


if __name__ == "__main__":
    main()
