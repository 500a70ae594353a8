"""A small decoder-only transformer as a layered model: [embedding, block, …, head]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ..errors import PlanningError


class Embedding(nn.Module):
    """Token and position embeddings: [samples, sequence] of int64 -> [samples, sequence, width]."""

    def __init__(self, vocabulary: int, sequence: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(sequence, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions


class Block(nn.Module):
    """Causal attention and a perceptron of four times the width, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm_attention = nn.LayerNorm(width)
        # Three matrices: the columns of one fused one would not be split between heads.
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_attention(x)
        query, key, value = (self._heads(matrix(normed)) for matrix in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.contract(F.gelu(self.expand(self.norm_mlp(x))))

    def _heads(self, x: Tensor) -> Tensor:
        """[samples, sequence, width] -> [samples, heads, sequence, head width], of the heads that are here."""
        return x.unflatten(2, (-1, self.head_width)).transpose(1, 2)


class Head(nn.Module):
    """The logits: [samples, sequence, width] -> [samples, sequence, vocabulary]."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


class Transformer(nn.Module):
    """`blocks` + 2 layers. Raises PlanningError for heads that do not divide the width."""

    def __init__(self, width: int, blocks: int, heads: int, sequence: int, vocabulary: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise PlanningError(f"width {width} with {heads} heads; the heads must divide the width")
        self.heads, self.sequence, self.vocabulary = heads, sequence, vocabulary
        self.layers = nn.ModuleList(
            [
                Embedding(vocabulary, sequence, width),
                *(Block(width, heads) for _ in range(blocks)),
                Head(width, vocabulary),
            ]
        )

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens

    def batch(self, samples: int, seed: int) -> tuple[Tensor, Tensor]:
        """Arithmetic progressions modulo the vocabulary, from random starts with random small steps: learnt quickly."""
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(self.vocabulary, (samples, 1), generator=generator)
        step = torch.randint(1, 4, (samples, 1), generator=generator)
        tokens = (start + step * torch.arange(self.sequence + 1)) % self.vocabulary
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy, averaged over each sample's tokens, summed over the samples."""
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / self.sequence

    def shard(self, mesh: DeviceMesh) -> None:
        """Columns of the first, rows of the second matrix of attention and perceptron; the vocabulary of the rest."""
        for name, count in (("heads", self.heads), ("words of the vocabulary", self.vocabulary)):
            if count % mesh.size():
                raise PlanningError(f"{count} {name} cannot be shared by {mesh.size()} devices; choose a divisor")
        block: dict[str, ParallelStyle] = {
            **{name: ColwiseParallel() for name in ("query", "key", "value", "expand")},
            **{name: RowwiseParallel() for name in ("project", "contract")},
        }
        for layer in self.layers:
            if isinstance(layer, Block):
                parallelize_module(layer, mesh, block)
            elif isinstance(layer, Embedding):
                parallelize_module(layer, mesh, {"tokens": RowwiseParallel(input_layouts=Replicate())})
            else:
                parallelize_module(layer, mesh, {"logits": ColwiseParallel(output_layouts=Replicate())})


def transformer(
    width: int = 128, blocks: int = 4, heads: int = 4, sequence: int = 64, vocabulary: int = 512, seed: int = 0
) -> Transformer:
    """The model, with weights that depend on the arguments alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(width, blocks, heads, sequence, vocabulary)
