"""Embedding tables spread over ranks: each pools its tables for all samples, and sends the vectors to their owners.

torchrun --nproc-per-node 2 examples/02_embedding_all_to_all.py
"""

import torch

import triton_ext as tx
from triton_ext.ops.embedding import unfused

TABLES, ROWS, DIM, SAMPLES = 8, 1000, 64, 256  # tables of each rank; samples of all ranks together


def main() -> None:
    group = tx.init()
    torch.manual_seed(group.rank())
    weight = torch.randn(TABLES * ROWS, DIM)  # the tables of this rank, one below the other
    table_starts = torch.arange(TABLES) * ROWS
    lookups = torch.randint(1, 40, (TABLES, SAMPLES))  # bags of different sizes
    indices = torch.randint(0, ROWS, (int(lookups.sum()),))
    offsets = (lookups.flatten().cumsum(0) - lookups.flatten()).view(TABLES, SAMPLES)

    # For the samples of this rank, the pooled vectors of all tables of all ranks, ready for the interaction layer.
    pooled = tx.ops.embedding_all_to_all(weight, table_starts, indices, offsets, mode="mean")

    torch.testing.assert_close(pooled, unfused(weight, table_starts, indices, offsets, mode="mean"))
    print(f"rank {group.rank()}: {tuple(pooled.shape)} [samples here, tables of all ranks, dimension]", flush=True)
    tx.shutdown()


if __name__ == "__main__":
    main()
