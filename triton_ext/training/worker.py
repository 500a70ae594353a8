"""One rank of a job: `torchrun -m triton_ext.training.worker FOLDER`, started by `launch.run`."""

from __future__ import annotations

import copy
import json
import math
import pickle
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TritonExtError
from . import model, quota
from .executor import Executor
from .launch import Job, Order

_MOST_WAIT_S = 60.0  # for a peer


def main(folder: Path) -> None:
    order: Order = pickle.loads((folder / "order").read_bytes())
    signal.alarm(math.ceil(order.timeout_s))  # ends this rank even if nobody else does
    torch.set_num_threads(order.job.threads)
    dist.init_process_group("gloo", timeout=timedelta(seconds=min(_MOST_WAIT_S, order.timeout_s)))
    rank = dist.get_rank()
    try:
        results = _execute(order.job, order.quotas[rank] if order.quotas else None, folder / "progress")
    except TritonExtError as error:
        (folder / "error").write_text(str(error))
        raise
    if rank == 0:
        partial = folder / "result.partial"
        partial.write_text(json.dumps(results))
        partial.rename(folder / "result.json")
    dist.destroy_process_group()


def _execute(job: Job, setting: str | None, progress: Path) -> list[dict[str, Any]]:
    whole = model.load(job.model, job.arguments)
    executors = [Executor(plan, copy.deepcopy(whole), job.learning_rate) for plan in job.plans]
    results = [_Result(executor) for executor in executors]
    if job.check:
        for result in results:
            result.check(whole)
    with quota.joined(setting):
        for result in results:
            for _ in range(job.warmup):
                result.step(timed=False)
        for _ in range(job.rounds):
            for number, result in enumerate(results):
                for _ in range(job.steps):
                    line = result.step(timed=True)
                    if line and dist.get_rank() == 0:
                        with progress.open("a") as file:
                            file.write(f"plan {number}, {line}\n" if len(results) > 1 else f"{line}\n")
    return [result.summary() for result in results]


class _Result:
    """The steps of one plan."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._steps_s: list[float] = []
        self._losses: list[float] = []
        self._differences: tuple[float, float] | None = None
        self._seed = 0

    def step(self, timed: bool) -> str:
        """Execute a step; what it took and its loss, in words."""
        executor = self._executor
        inputs, targets = executor.model.batch(executor.plan.global_batch, self._seed)
        self._seed += 1
        dist.barrier()
        begin = time.perf_counter()  # the same clock on all ranks, which are on one machine
        loss = executor.step(inputs, targets)
        end = time.perf_counter()
        used = executor.used
        times = _maximum(
            [end if used else -math.inf, -begin if used else -math.inf, -math.inf if loss is None else loss]
        )
        step_s, loss = times[0] + times[1], times[2]
        if timed:
            self._steps_s.append(step_s)
            self._losses.append(loss)
        return f"step {len(self._losses)}: loss {loss:.4f}, {step_s * 1e3:.1f} ms"

    def check(self, whole: model.LayeredModel) -> None:
        """Compare one step with what this process alone computes from the same model and batch."""
        executor = self._executor
        inputs, targets = executor.model.batch(executor.plan.global_batch, seed=2**31)
        loss = executor.step(inputs, targets, update=False)
        gradients = executor.gradients()
        expected = _single_process(whole, inputs, targets)
        layers: dict[str, list[str]] = {}
        for name in gradients:
            layers.setdefault(name.split(".")[1], []).append(name)
        gradient_difference = max(
            (
                max(float((gradients[name] - expected[name]).abs().max()) for name in names)
                / max(float(expected[name].abs().max()) for name in names)
                for names in layers.values()
            ),
            default=0.0,
        )
        loss_difference = 0.0 if loss is None else abs(loss / float(expected["loss"]) - 1)
        self._differences = tuple(_maximum([loss_difference, gradient_difference]))  # type: ignore[assignment]

    def summary(self) -> dict[str, Any]:
        loss, gradient = self._differences or (None, None)
        return {
            "steps_s": self._steps_s,
            "losses": self._losses,
            "loss_difference": loss,
            "gradient_difference": gradient,
        }


def _single_process(whole: model.LayeredModel, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The mean loss over the batch, as "loss", and its gradients, by parameter."""
    whole = copy.deepcopy(whole)
    value = inputs
    for layer in whole.layers:
        value = layer(value)
    loss = whole.loss(value, targets) / len(inputs)
    loss.backward()
    found = {
        f"layers.{index}.{name}": parameter.grad
        for index, layer in enumerate(whole.layers)
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }
    return found | {"loss": loss.detach()}


def _maximum(values: list[float]) -> list[float]:
    """Of all ranks' values, each."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
