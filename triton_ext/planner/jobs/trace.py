"""Generated jobs, and the public cluster specification that they are put on."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import PlanningError
from .job import Flow, Job
from .network import Network, clos
from .simulator import Submission


@dataclass(frozen=True)
class Model:
    """What data-parallel training of a model does per iteration. Assumed orders of magnitude, not measurements."""

    name: str
    gradient_bytes: float
    compute_s: float
    flop_per_gpu: float
    hosts: tuple[int, ...]  # sizes of its jobs
    overlap_start: float


MODELS = (
    Model("gpt-13b", 26e9, 1.2, 250e12 * 1.2, (8, 16, 32, 64), 0.5),
    Model("gpt-7b", 14e9, 0.8, 220e12 * 0.8, (4, 8, 16), 0.5),
    Model("bert-large", 0.7e9, 0.12, 90e12 * 0.12, (1, 2, 4, 8), 0.6),
    Model("resnet-50", 0.05e9, 0.08, 40e12 * 0.08, (1, 2), 0.3),
)


def generate(hosts: Sequence[str], gpus_per_host: int, span_s: float, seed: int) -> tuple[Submission, ...]:
    """Jobs that fill nine tenths of the hosts, each host for one job only; arrivals over the first half of span_s.

    A job's hosts are neighbours in a list of hosts that is shuffled by fours, as a busy cluster is fragmented. Each
    host sends 2 (n - 1) / n gradients to the next in its ring. A third of the jobs leave after a tenth to a half of
    span_s, were they alone; the others stay.
    """
    random = np.random.default_rng(seed)
    blocks = [list(hosts[i : i + 4]) for i in range(0, len(hosts), 4)]
    order = random.permutation(len(blocks))
    free = [host for block in order for host in blocks[block]]
    left = int(0.9 * len(free))
    submissions: list[Submission] = []
    while left > 0:
        model = MODELS[int(random.integers(len(MODELS)))]
        count = min(int(random.choice(model.hosts)), left)
        chosen, free = free[:count], free[count:]
        left -= count
        size_bytes = 2 * (count - 1) / count * model.gradient_bytes
        flows = tuple(Flow(a, b, size_bytes) for a, b in zip(chosen, chosen[1:] + chosen[:1], strict=True) if a != b)
        gpus = count * gpus_per_host
        name = f"{model.name}-{gpus}-{len(submissions)}"
        job = Job(name, gpus, gpus * model.flop_per_gpu, model.compute_s, flows, model.overlap_start)
        stays = random.random() < 2 / 3
        iterations = None if stays else int(random.uniform(0.1, 0.5) * span_s / model.compute_s) + 1
        submissions.append(Submission(job, float(random.uniform(0, span_s / 2)), iterations))
    return tuple(submissions)


@dataclass(frozen=True)
class Specification:
    """Switches, hosts under each and GPUs in each, as in the cluster_spec files of Tiresias (NSDI 2019)."""

    switches: int
    hosts_per_switch: int
    gpus_per_host: int

    def network(self, aggregations: int, host_bytes_per_second: float, uplink_bytes_per_second: float) -> Network:
        """The specification says nothing of links: they are a Clos above its switches."""
        return clos(self.switches, self.hosts_per_switch, aggregations, host_bytes_per_second, uplink_bytes_per_second)

    def hosts(self) -> tuple[str, ...]:
        return tuple(f"host{i}" for i in range(self.switches * self.hosts_per_switch))


def read_specification(file: Path) -> Specification:
    columns = ("num_switch", "num_node_p_switch", "num_gpu_p_node")
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            row = next(csv.DictReader(lines))
        return Specification(*(int(row[column]) for column in columns))
    except (OSError, StopIteration, KeyError, ValueError, TypeError) as error:
        raise PlanningError(f"{file}: no cluster specification ({error!r}); it needs {', '.join(columns)}") from None
