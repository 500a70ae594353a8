"""torch's pipeline stage, between stages of different replicas and tensor-parallel degrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from .layout import Part


class ReplicatedStage(PipelineStage):
    """A chunk of layers on one device. torch's schedules call it; what it exchanges with its neighbours is not one
    tensor with one peer, as in `PipelineStage`, but parts of a micro-batch's samples with several.

    All shapes are given, so nothing is inferred by running the stage, and peers are ranks of the default group.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        count: int,
        group: dist.ProcessGroup,
        *,
        example_input: Tensor,
        example_output: Tensor,
        inputs_from: Sequence[Part],
        outputs_to: Sequence[Part],
        gradients_from: Sequence[Part],
        gradients_to: Sequence[Part],
    ) -> None:
        super().__init__(
            module, index, count, torch.device("cpu"), input_args=example_input, output_args=example_output, group=group
        )
        self._inputs_from, self._outputs_to = inputs_from, outputs_to
        self._gradients_from, self._gradients_to = gradients_from, gradients_to

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        (info,) = self.args_recv_info[fwd_chunk_id]
        return self._operations(dist.irecv, info.buffer, self._inputs_from, fwd_chunk_id, 2 * self.stage_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        (output,), _ = self.fwd_cache[fwd_chunk_id]
        return self._operations(dist.isend, output, self._outputs_to, fwd_chunk_id, 2 * (self.stage_index + 1))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        (info,) = self.grad_recv_info[bwd_chunk_id]
        return self._operations(dist.irecv, info.buffer, self._gradients_from, bwd_chunk_id, 2 * self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        gradient = self.bwd_cache.pop(bwd_chunk_id)[0]
        if self.is_first:
            return []
        return self._operations(dist.isend, gradient, self._gradients_to, bwd_chunk_id, 2 * self.stage_index - 1)

    def _operations(
        self,
        operation: Callable[..., Any],
        tensor: Tensor | None,
        parts: Sequence[Part],
        microbatch: int,
        crossing: int,
    ) -> list[dist.P2POp]:
        """Tags keep messages apart between ranks that share several cuts of the pipeline."""
        assert tensor is not None  # all shapes were given
        tensor = tensor.detach()
        tag = microbatch * 2 * (self.num_stages + 1) + crossing
        return [dist.P2POp(operation, tensor[part.begin : part.end], part.peer, tag=tag) for part in parts]

    # torch's schedules agree here on whether shapes are to be inferred, or say hello, through one peer for each
    # neighbour: there is nothing to agree on.
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)
