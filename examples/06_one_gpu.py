"""The three operators on one device with several virtual ranks: a GPU if there is one, otherwise the CPU.

python examples/06_one_gpu.py
"""

import torch

import triton_ext as tx

WORLD = 4


def rank_main(rank: int, device: str) -> None:
    def each(*shape: int) -> list[torch.Tensor]:
        """One tensor for every rank; the same list on all of them."""
        generator = torch.Generator().manual_seed(sum(shape))
        return [torch.randn(shape, generator=generator).to(device) for _ in range(WORLD)]

    def check(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
        error = float((result.double() - expected).abs().max() / expected.abs().max())
        assert error < 1e-2 if device == "cuda" else error < 1e-5, f"{name}: relative error {error:.2g}"
        if rank == 0:
            print(f"{name}: {tuple(result.shape)} on {result.device}, relative error {error:.1g}", flush=True)

    for _ in range(3):  # the second and third run reuse the plans
        a, b = each(1000, 512), each(512, 384)
        products = torch.stack([x.double() @ w.double() for x, w in zip(a, b, strict=True)])
        mine = torch.cat([product.chunk(WORLD)[rank] for product in products])
        check("gemm_all_to_all", tx.ops.gemm_all_to_all(a[rank], b[rank]), mine)

        x, w = each(1, 1024), each(4096, 1024)
        total = sum(u.double() @ v.double().T for u, v in zip(x, w, strict=True))
        check("gemv_all_reduce", tx.ops.gemv_all_reduce(x[rank], w[rank]), total)

        tables, samples, rows, lookups = 6, 130, 500, 9
        weight = each(tables * rows, 64)
        starts = torch.arange(tables, device=device) * rows
        indices = torch.randint(0, rows, (tables * samples * lookups,), generator=torch.Generator().manual_seed(1))
        indices = indices.to(device)
        offsets = (torch.arange(tables * samples, device=device) * lookups).view(tables, samples)
        where = (indices + starts.repeat_interleave(samples * lookups)).view(tables, samples, lookups)
        pooled = torch.cat([v.double()[where].sum(2) for v in weight]).transpose(0, 1)
        result = tx.ops.embedding_all_to_all(weight[rank], starts, indices, offsets)
        check("embedding_all_to_all", result, pooled.chunk(WORLD)[rank])


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tx.testing.World(WORLD, device).run(rank_main, device)
