"""What one GPU can run of the transports between GPUs: stores between virtual ranks, torch's symmetric memory, NVSHMEM.

python examples/07_one_gpu_transports.py
"""

import importlib.util

import torch

import triton_ext as tx

WORLD = 2


def check(name: str, result: torch.Tensor, expected: torch.Tensor, says: bool) -> None:
    error = float((result.double() - expected).abs().max() / expected.abs().max())
    assert error < 1e-2, f"{name}: relative error {error:.2g}"
    if says:
        print(f"{name}: {tuple(result.shape)} on {result.device}, relative error {error:.1g}", flush=True)


def rank_main(rank: int, world: int, how: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, x, w = (
        torch.randn(world, *shape, generator=generator).cuda()
        for shape in ((1000, 512), (512, 384), (1, 1024), (4096, 1024))
    )
    products = a.double() @ b.double()
    total = (x.double() @ w.double().transpose(1, 2)).sum(0)
    for run in range(3):  # the second and third run reuse the plans, and what they stored in an outbox
        last = run == 2 and rank == 0
        mine = torch.cat([product.chunk(world)[rank] for product in products])
        check(f"{how}: gemm_all_to_all", tx.ops.gemm_all_to_all(a[rank], b[rank]), mine, last)
        check(f"{how}: gemv_all_reduce", tx.ops.gemv_all_reduce(x[rank], w[rank]), total, last)


def main() -> None:
    if not torch.cuda.is_available():
        print("there is no GPU here: nothing to run (examples/06_one_gpu.py runs on a CPU)")
        return
    tx.testing.World(WORLD, "cuda").run(rank_main, WORLD, "stores between virtual ranks")

    tx.init()  # a job of one process, whose segment comes from torch's symmetric memory
    rank_main(0, 1, "symmetric memory, one rank")

    if importlib.util.find_spec("nvshmem"):
        # Virtual ranks on two virtual hosts: what goes from one to the other goes through NVSHMEM, to its own GPU.
        tx.testing.World(WORLD, "cuda", hosts=range(WORLD)).run(rank_main, WORLD, "NVSHMEM between virtual hosts")
    else:
        print("NVSHMEM is not installed: pip install nvshmem4py-cu12 (or -cu13)")
    tx.shutdown()


if __name__ == "__main__":
    main()
