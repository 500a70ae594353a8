"""Training steps of a parallelism plan, as one rank executes them with torch.distributed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ..errors import PlanningError
from ..planner.parallel.plan import ParallelPlan
from . import layout
from .model import LayeredModel, boundaries, shardable
from .stage import ReplicatedStage


def optimizer(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """AdamW, with sharded and whole parameters apart: its batched updates do not mix them."""
    kinds: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in kinds.values()], lr=learning_rate)


class Executor:
    """One rank's part of a plan. Collective: every rank of the default group makes it and calls `step`, also those
    that the plan does not use. Ranks are the plan's device indices.

    The model is whole on each rank at first; what is not computed there is dropped. Raises PlanningError for a plan
    that is not for the model, or cannot be executed (`layout.check`).
    """

    def __init__(self, plan: ParallelPlan, model: LayeredModel, learning_rate: float = 1e-3) -> None:
        layout.check(plan)
        if plan.layers != len(model.layers):
            raise PlanningError(f"a plan of {plan.layers} layers for a model of {len(model.layers)}; plan again")
        self.plan, self.model, self.rank = plan, model, dist.get_rank()
        self._learning_rate = learning_rate
        # Every rank makes every group, in the same order: so does torch ask. It also numbers a group's ranks in
        # ascending order, whatever the mesh's, and would give a rank another's shard: so devices are sorted.
        meshes = [
            DeviceMesh("cpu", [sorted(r.devices) for r in stage.replicas], mesh_dim_names=("dp", "tp"))
            for stage in plan.stages
        ]
        pipelines = [
            [stage.devices[index % len(stage.devices)] for stage in plan.stages]
            for index in range(max(len(stage.devices) for stage in plan.stages))
        ]
        groups = [dist.new_group(ranks) for ranks in pipelines]
        found = [(n, layout.place(stage, self.rank)) for n, stage in enumerate(plan.stages)]
        mine = [(number, where) for number, where in found if where is not None]
        self.parameters: dict[str, nn.Parameter] = {}
        if not mine:
            return
        ((self.stage, (self.replica, _)),) = mine
        self._mesh = meshes[self.stage]
        group = next(g for g, ranks in zip(groups, pipelines, strict=True) if self.rank in ranks)
        self._build(group)

    @property
    def used(self) -> bool:
        """Whether the plan uses this rank."""
        return bool(self.parameters)

    def step(self, inputs: Tensor, targets: Tensor, *, update: bool = True) -> float | None:
        """One training step on the global batch, of which this rank takes its samples; the gradients are those of the
        mean loss over the batch, on every replica. Returns the loss where the last stage's first replica is, else
        None."""
        if not self.used:
            return None
        self._optimizer.zero_grad()
        losses: list[Tensor] = []
        if self._samples[0] < self._samples[1]:
            first, last = self.stage == 0, self.stage == len(self.plan.stages) - 1
            arguments = (self._own(inputs),) if first else ()
            target = self._own(targets) if last else None
            self._schedule.step(*arguments, target=target, losses=losses, return_outputs=False)
        loss = self._reduce(losses)
        if update:
            self._optimizer.step()
        return loss

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradients of this rank's layers, by the parameters' names in the model. Collective in its stage."""
        return {name: _whole(p.grad) for name, p in self.parameters.items() if p.grad is not None}

    def _build(self, group: dist.ProcessGroup) -> None:
        plan, model = self.plan, self.model
        self._samples = layout.samples(plan.stages[self.stage], self.replica)
        count = self._samples[1] - self._samples[0]
        shapes = boundaries(model, max(count, 1))
        if plan.stages[self.stage].tp > 1:
            shardable(model, plan.stages[self.stage].tp).shard(self._mesh["tp"])
        order = layout.chunks(plan)
        stages: list[_PipelineStageBase] = []
        for index, chunk in enumerate(order):
            if chunk.stage != self.stage:
                continue
            layers: list[nn.Module] = []
            for number in range(chunk.begin, chunk.end):
                layer = model.layers[number]
                self.parameters |= {f"layers.{number}.{name}": p for name, p in layer.named_parameters()}
                layers.append(Recomputed(layer) if plan.settings.recompute_activations else layer)
            before = plan.stages[order[index - 1].stage] if index else None
            after = plan.stages[order[index + 1].stage] if index + 1 < len(order) else None
            here = plan.stages[self.stage]
            stages.append(
                ReplicatedStage(
                    nn.Sequential(*layers),
                    index,
                    len(order),
                    group,
                    example_input=_example(shapes[chunk.begin], index > 0),
                    example_output=_example(shapes[chunk.end], True),
                    inputs_from=layout.received(before, here, self.rank) if before else (),
                    outputs_to=layout.sent(here, after, self.rank) if after else (),
                    gradients_from=layout.received(after, here, self.rank) if after else (),
                    gradients_to=layout.sent(here, before, self.rank) if before else (),
                )
            )
        self.model.layers = nn.ModuleList()  # nothing else holds the layers of other ranks
        self._optimizer = optimizer(self.parameters.values(), self._learning_rate)
        self._schedule: _PipelineSchedule
        if plan.schedule == "interleaved":
            self._schedule = ScheduleInterleaved1F1B(stages, plan.microbatches, self._loss, scale_grads=False)
        else:
            kind = Schedule1F1B if plan.schedule == "1f1b" else ScheduleGPipe
            self._schedule = kind(stages[0], plan.microbatches, self._loss, scale_grads=False)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.model.loss(output, target) / self.plan.global_batch

    def _own(self, batch: Tensor) -> Tensor:
        """This replica's samples of every micro-batch, one after the other."""
        begin, end = self._samples
        parts = batch.unflatten(0, (self.plan.microbatches, self.plan.microbatch_samples))[:, begin:end]
        return parts.flatten(0, 1)

    def _reduce(self, losses: list[Tensor]) -> float | None:
        """Add the replicas' gradients up, and the loss with them, in one message."""
        local = []
        for parameter in self.parameters.values():
            gradient = parameter.grad
            if gradient is None:  # of a replica without samples
                gradient = torch.zeros_like(parameter)
            elif isinstance(gradient, DTensor) and isinstance(parameter, DTensor):  # a shared embedding's is whole
                gradient = gradient.redistribute(placements=parameter.placements)
            parameter.grad = gradient
            local.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        if self.plan.stages[self.stage].dp > 1:
            message = torch.cat([*(gradient.flatten() for gradient in local), loss.view(1)])
            dist.all_reduce(message, group=self._mesh["dp"].get_group())
            *sums, total = message.split([*(gradient.numel() for gradient in local), 1])
            for gradient, values in zip(local, sums, strict=True):
                gradient.copy_(values.view_as(gradient))
            loss = total[0]
        reports = self.rank == self.plan.stages[-1].devices[0]
        return float(loss) if reports else None


class Recomputed(nn.Module):
    """A layer whose activations are computed again for the backward pass, instead of kept."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def _example(like: Tensor, needs_gradient: bool) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype).requires_grad_(needs_gradient)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
