"""Flash attention with its gradients: the matrix of scores never exists, only tiles of it do.

python examples/triton/06_attention.py
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from compare import DEVICE, ON_CPU, compare

BLOCKS = {"BQ": 128, "BK": 128} if ON_CPU else {"BQ": 64, "BK": 32}
LOG2_E = 1.4426950408889634


@triton.jit
def tile_at(matrix, first, length, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows of a contiguous matrix, zeros behind its end."""
    row = first + tl.arange(0, ROWS)
    return tl.load(matrix + row[:, None] * D + tl.arange(0, D)[None, :], mask=row[:, None] < length, other=0.0)


@triton.jit
def put_tile(matrix, tile, first, length, ROWS: tl.constexpr, D: tl.constexpr):
    row = first + tl.arange(0, ROWS)
    place = matrix + row[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(place, tile.to(matrix.dtype.element_ty), mask=row[:, None] < length)


@triton.jit
def visible(query, key, length, CAUSAL: tl.constexpr):
    """Which of the keys a query looks at; query and key are positions that broadcast to the shape of a tile."""
    seen = key < length
    if CAUSAL:
        seen = seen & (key <= query)
    return seen


@triton.jit
def look_at(
    q, keys, values, top, total, mixed, first_query, begin, end, length, scale,
    BQ: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Continue the softmax of some queries with keys from begin to end.

    top is the greatest score so far, total the sum of the weights and mixed the weighted values, both relative to top.
    """
    for first_key in range(begin, end, BK):
        k = tile_at(keys, first_key, length, BK, D)
        scores = tl.dot(q, tl.trans(k)) * scale
        if MASKED:
            query, key = first_query + tl.arange(0, BQ), first_key + tl.arange(0, BK)
            scores = tl.where(visible(query[:, None], key[None, :], length, CAUSAL), scores, -float("inf"))
        greatest = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - greatest[:, None])
        shrink = tl.exp2(top - greatest)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tile_at(values, first_key, length, BK, D)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None])
        top = greatest
    return top, total, mixed


@triton.jit
def attend(
    queries, keys, values, result, log_sums, length, scale,
    BQ: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """BQ queries of one head. scale includes log2(e): exp2 is what processors have."""
    first = tl.program_id(0) * BQ
    head = tl.program_id(1).to(tl.int64) * length * D
    keys += head
    values += head
    q = tile_at(queries + head, first, length, BQ, D)
    top = tl.full([BQ], -float("inf"), tl.float32)
    total = tl.zeros([BQ], tl.float32)
    mixed = tl.zeros([BQ, D], tl.float32)
    # Most blocks of keys are seen by all queries here and need no mask.
    if CAUSAL:
        whole = min(first, length) // BK * BK
        end = min(first + BQ, length)
    else:
        whole = length // BK * BK
        end = length
    top, total, mixed = look_at(
        q, keys, values, top, total, mixed, first, 0, whole, length, scale, BQ, BK, D, CAUSAL, False
    )
    top, total, mixed = look_at(
        q, keys, values, top, total, mixed, first, whole, end, length, scale, BQ, BK, D, CAUSAL, True
    )
    put_tile(result + head, mixed / total[:, None], first, length, BQ, D)
    query = first + tl.arange(0, BQ)
    tl.store(log_sums + tl.program_id(1) * length + query, top + tl.log2(total), mask=query < length)


@triton.jit
def agreement(result, gradient, dots, length, BQ: tl.constexpr, D: tl.constexpr):
    """For each query, its result times the gradient of it: what the softmax takes off the gradients of scores."""
    first = tl.program_id(0) * BQ
    head = tl.program_id(1).to(tl.int64) * length * D
    o = tile_at(result + head, first, length, BQ, D).to(tl.float32)
    do = tile_at(gradient + head, first, length, BQ, D).to(tl.float32)
    query = first + tl.arange(0, BQ)
    tl.store(dots + tl.program_id(1) * length + query, tl.sum(o * do, axis=1), mask=query < length)


@triton.jit
def of_keys(
    queries, keys, values, gradient, log_sums, dots, dk_out, dv_out, length, scale, steepness,
    BQ: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Gradients of BK keys and values of one head, from all the queries that see them. Tiles are key by query."""
    first_key = tl.program_id(0) * BK
    head = tl.program_id(1).to(tl.int64) * length * D
    k = tile_at(keys + head, first_key, length, BK, D)
    v = tile_at(values + head, first_key, length, BK, D)
    dk = tl.zeros([BK, D], tl.float32)
    dv = tl.zeros([BK, D], tl.float32)
    key = first_key + tl.arange(0, BK)
    begin = first_key // BQ * BQ if CAUSAL else 0
    for first in range(begin, length, BQ):
        query = first + tl.arange(0, BQ)
        exists = query < length
        log_sum = tl.load(log_sums + tl.program_id(1) * length + query, mask=exists, other=0.0)
        dot = tl.load(dots + tl.program_id(1) * length + query, mask=exists, other=0.0)
        q = tile_at(queries + head, first, length, BQ, D)
        do = tile_at(gradient + head, first, length, BQ, D)
        scores = tl.dot(k, tl.trans(q)) * scale
        seen = visible(query[None, :], key[:, None], length, CAUSAL) & exists[None, :]
        weights = tl.where(seen, tl.exp2(scores - log_sum[None, :]), 0.0)
        dv = tl.dot(weights.to(do.dtype), do, dv)
        of_scores = weights * (tl.dot(v, tl.trans(do)) - dot[None, :])
        dk = tl.dot(of_scores.to(q.dtype), q, dk)
    put_tile(dk_out + head, dk * steepness, first_key, length, BK, D)
    put_tile(dv_out + head, dv, first_key, length, BK, D)


@triton.jit
def of_queries(
    queries, keys, values, gradient, log_sums, dots, dq_out, length, scale, steepness,
    BQ: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Gradients of BQ queries of one head, from all the keys that they see."""
    first = tl.program_id(0) * BQ
    head = tl.program_id(1).to(tl.int64) * length * D
    query = first + tl.arange(0, BQ)
    exists = query < length
    q = tile_at(queries + head, first, length, BQ, D)
    do = tile_at(gradient + head, first, length, BQ, D)
    log_sum = tl.load(log_sums + tl.program_id(1) * length + query, mask=exists, other=0.0)
    dot = tl.load(dots + tl.program_id(1) * length + query, mask=exists, other=0.0)
    dq = tl.zeros([BQ, D], tl.float32)
    end = min(first + BQ, length) if CAUSAL else length
    for first_key in range(0, end, BK):
        key = first_key + tl.arange(0, BK)
        k = tile_at(keys + head, first_key, length, BK, D)
        v = tile_at(values + head, first_key, length, BK, D)
        scores = tl.dot(q, tl.trans(k)) * scale
        seen = visible(query[:, None], key[None, :], length, CAUSAL)
        weights = tl.where(seen, tl.exp2(scores - log_sum[:, None]), 0.0)
        of_scores = weights * (tl.dot(do, tl.trans(v)) - dot[:, None])
        dq = tl.dot(of_scores.to(k.dtype), k, dq)
    put_tile(dq_out + head, dq * steepness, first, length, BQ, D)


class Attention(torch.autograd.Function):
    """Saves one number for each query beside inputs and result: the scores are computed again for the gradients."""

    @staticmethod
    def forward(ctx, q, k, v, causal, blocks):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        batch, heads, length, size = q.shape
        result = torch.empty_like(q)
        log_sums = torch.empty(batch, heads, length, device=q.device)
        attend[(triton.cdiv(length, blocks["BQ"]), batch * heads)](
            q, k, v, result, log_sums, length, LOG2_E / size**0.5, D=size, CAUSAL=causal, **blocks
        )
        ctx.save_for_backward(q, k, v, result, log_sums)
        ctx.causal, ctx.blocks = causal, blocks
        return result

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, result, log_sums = ctx.saved_tensors
        batch, heads, length, size = q.shape
        gradient = gradient.contiguous()
        dots = torch.empty_like(log_sums)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        tiles = {name: (triton.cdiv(length, block), batch * heads) for name, block in ctx.blocks.items()}
        agreement[tiles["BQ"]](result, gradient, dots, length, BQ=ctx.blocks["BQ"], D=size)
        given = (q, k, v, gradient, log_sums, dots)
        numbers = (length, LOG2_E / size**0.5, size**-0.5)
        of_keys[tiles["BK"]](*given, dk, dv, *numbers, D=size, CAUSAL=ctx.causal, **ctx.blocks)
        of_queries[tiles["BQ"]](*given, dq, *numbers, D=size, CAUSAL=ctx.causal, **ctx.blocks)
        return dq, dk, dv, None, None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, blocks: dict[str, int] = BLOCKS
) -> torch.Tensor:
    """Of [batch, heads, length, size] tensors, size a power of two."""
    return Attention.apply(q, k, v, causal, blocks)


def main() -> None:
    torch.manual_seed(0)
    for length, causal in ((1024, False), (1024, True), (700, True)):
        q, k, v = (torch.randn(1, 8, length, 64, device=DEVICE, requires_grad=True) for _ in range(3))
        name = f"attention, 8 heads, {length} x 64, {'causal' if causal else 'full'}"
        with torch.no_grad():
            compare(
                f"{name}, forward",
                lambda q=q, k=k, v=v, causal=causal: attention(q, k, v, causal),
                lambda q=q, k=k, v=v, causal=causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
                1e-2,
            )
        result, expected = attention(q, k, v, causal), F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        gradient = torch.randn_like(result)

        def gradients(of: torch.Tensor, q=q, k=k, v=v, gradient=gradient) -> torch.Tensor:
            return torch.stack(torch.autograd.grad(of, (q, k, v), gradient, retain_graph=True))

        compare(f"{name}, backward", lambda r=result: gradients(r), lambda r=expected: gradients(r), 2e-2, runs=5)


if __name__ == "__main__":
    main()
