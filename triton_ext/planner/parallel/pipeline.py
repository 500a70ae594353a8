"""A training step, event by event: the truth that cost models and searches are held to.

Every replica computes its operations in the order of the schedule, one at a time, each as soon as what it needs has
arrived. Activations and their gradients travel while others compute and share links and ports with everything that
travels at the same time (flows.py); a transfer arrives its path's latency after its last byte has left. When all
replicas of a stage have computed their last backward and sent its gradients, a ring all-reduces their gradients, and
the optimizer runs. Tensor parallelism's own communication is part of a profile's times.

Parameters sharded over replicas (ZeRO 3) are gathered before each forward and each backward, and gradients scattered
after each backward, within the operation's time and without contention.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ...errors import PlanningError
from ..cluster import Cluster
from . import traffic
from .flows import Flow, FlowNetwork, Resource
from .layer_tables import LayerTables
from .plan import ParallelPlan
from .profiles import Profiles
from .schedule import Operation, layer_runs, operations
from .stage_costs import gather_s, replica_tables

FORWARD, BACKWARD, ALL_REDUCE, OPTIMIZER = "forward", "backward", "all_reduce", "optimizer"


@dataclass(frozen=True)
class Event:
    """What a device does from start_s to end_s; microbatch and chunk are -1 for the step's end."""

    device: int
    kind: str  # FORWARD, BACKWARD, ALL_REDUCE or OPTIMIZER
    stage: int
    start_s: float
    end_s: float
    microbatch: int = -1
    chunk: int = -1


@dataclass(frozen=True)
class Sent:
    """A part of a micro-batch's activation (forward) or gradient, between the first devices of two replicas."""

    source_device: int
    destination_device: int
    forward: bool
    microbatch: int
    start_s: float
    end_s: float
    bytes: int


@dataclass(frozen=True)
class Step:
    """One simulated step.

    By device (of the plan's devices only): compute_s; exposed_communication_s, which is time without work while what
    the device waits for is on its way; peak_memory_bytes. The rest of the step is the device's bubble.
    """

    step_time_s: float
    events: tuple[Event, ...]
    sent: tuple[Sent, ...]
    compute_s: dict[int, float]
    exposed_communication_s: dict[int, float]
    peak_memory_bytes: dict[int, int]

    @property
    def bubble(self) -> float:
        """The part of all devices' time in which they neither compute nor wait for data on its way."""
        total = self.step_time_s * len(self.compute_s)
        used = sum(self.compute_s.values()) + sum(self.exposed_communication_s.values())
        return max(0.0, 1 - used / total) if total else 0.0

    @property
    def exposed_communication(self) -> float:
        """The part of all devices' time in which they wait for data on its way."""
        total = self.step_time_s * len(self.compute_s)
        return sum(self.exposed_communication_s.values()) / total if total else 0.0


def simulate(plan: ParallelPlan, cluster: Cluster, profiles: Profiles) -> Step:
    """Run one step of a plan. Raises PlanningError for a plan with another number of layers than the model, with
    devices that the cluster does not have, or with profile points that are neither there nor between others."""
    check(plan, cluster, profiles)
    return _Simulation(plan, cluster, profiles).run()


def check(plan: ParallelPlan, cluster: Cluster, profiles: Profiles) -> None:
    """Raises PlanningError unless a plan fits a model and a cluster."""
    if plan.layers != profiles.model.layers:
        raise PlanningError(
            f"the plan has {plan.layers} layers, the model {profiles.model.name} {profiles.model.layers}"
        )
    for number, stage in enumerate(plan.stages):
        for device in stage.devices:
            if not 0 <= device < len(cluster.devices):
                raise PlanningError(
                    f"stage {number} uses device {device}; the cluster has devices 0 to {len(cluster.devices) - 1}"
                )


@dataclass(eq=False)
class _Worker:
    """A replica with what it still has to do."""

    stage: int
    index: int
    devices: tuple[int, ...]
    order: list[Operation]
    seconds: list[tuple[float, float]]  # forward and backward, by chunk
    flight_bytes: list[float]  # by chunk
    memory_bytes: float
    peak_bytes: float = 0.0
    next: int = 0
    busy: bool = False
    free_s: float = 0.0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    unsent: int = 0  # gradients of the last micro-batches on their way
    arrived: dict[Operation, tuple[int, float]] = field(default_factory=dict)  # how many, and when the last one left


class _Simulation:
    def __init__(self, plan: ParallelPlan, cluster: Cluster, profiles: Profiles) -> None:
        self.plan, self.cluster = plan, cluster
        self.outputs = profiles.model.activation_bytes
        self.runs = layer_runs(plan)
        self.chunks = len(self.runs[0])
        self.tables = LayerTables(profiles, plan.settings)
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.events: list[Event] = []
        self.sent: list[Sent] = []
        self.network = FlowNetwork({})
        self._arrivals: dict[Flow, tuple[Callable[[], None], float]] = {}
        stages = plan.stages
        last = len(stages) - 1
        pairs = list(itertools.pairwise(stage.replicas for stage in stages))
        self.forward = [traffic.boundary(cluster, a, b) for a, b in pairs]
        self.backward = [traffic.boundary(cluster, b, a) for a, b in pairs]
        if self.chunks > 1:  # from the last stage's chunk to the first stage's next one
            self.forward.append(traffic.boundary(cluster, stages[last].replicas, stages[0].replicas))
            self.backward.append(traffic.boundary(cluster, stages[0].replicas, stages[last].replicas))
        self.rings = [traffic.ring(cluster, stage.replicas) if stage.dp > 1 else [] for stage in stages]
        self.unfinished = [stage.dp for stage in stages]
        self.workers = [[self._worker(s, r) for r in range(stage.dp)] for s, stage in enumerate(stages)]
        for transfers in (*self.forward, *self.backward, *self.rings):
            for transfer in transfers:
                for resource in transfer.resources:
                    self.network.capacity[resource] = traffic.capacity(cluster, resource)

    def _worker(self, number: int, index: int) -> _Worker:
        plan, stage = self.plan, self.plan.stages[number]
        runs = self.runs[number]
        tables = replica_tables(self.tables, self.cluster, stage, index)
        seconds, flight, fixed = [], [], 0.0
        for run in runs:
            gather = gather_s(self.cluster, self.tables, stage, run)
            seconds.append(
                (
                    max(float(t.forward_s[run]) for t in tables) + gather,
                    max(float(t.backward_s[run]) for t in tables) + 2 * gather,
                )
            )
            flight.append(max(float(t.flight_bytes[run]) for t in tables))
            fixed += max(float(t.fixed_bytes[run]) for t in tables)
        order = operations(plan.schedule, number, len(plan.stages), plan.microbatches, self.chunks)
        return _Worker(number, index, stage.replicas[index].devices, order, seconds, flight, fixed, fixed)

    # --- the loop ---

    def run(self) -> Step:
        for stage in self.workers:
            for worker in stage:
                self._continue(worker)
        while self.queue:
            self.now, _, action = heapq.heappop(self.queue)
            action()
        compute, exposed, memory = {}, {}, {}
        for stage in self.workers:
            for worker in stage:
                assert worker.next == len(worker.order)  # the schedules have no deadlock
                for device in worker.devices:
                    compute[device] = worker.compute_s
                    exposed[device] = worker.exposed_s
                    memory[device] = round(worker.peak_bytes)
        return Step(self.now, tuple(self.events), tuple(self.sent), compute, exposed, memory)

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (time_s, self.count, action))

    def _send(
        self, size: float, resources: tuple[Resource, ...], latency_s: float, arrived: Callable[[], None]
    ) -> None:
        if size <= 0:
            self._at(self.now + latency_s, arrived)
            return
        flow = Flow(size, resources)
        self._arrivals[flow] = (arrived, latency_s)
        self._reschedule(self.network.start(flow, self.now))

    def _reschedule(self, flows: list[Flow]) -> None:
        for flow in flows:
            self._at(flow.end_s, partial(self._flow_end, flow, flow.version))

    def _flow_end(self, flow: Flow, version: int) -> None:
        if version == flow.version and flow in self._arrivals:
            arrived, latency_s = self._arrivals.pop(flow)
            self._at(self.now + latency_s, arrived)
            self._reschedule(self.network.end(flow, self.now))

    # --- computing ---

    def _continue(self, worker: _Worker) -> None:
        """Begin the worker's next operation if it can."""
        if worker.busy or worker.next == len(worker.order):
            return
        operation = worker.order[worker.next]
        count, left_s = worker.arrived.get(operation, (0, self.now))
        if count < self._expected(worker, operation):
            return
        worker.arrived.pop(operation, None)
        worker.exposed_s += max(0.0, self.now - max(worker.free_s, left_s))
        worker.busy = True
        if operation.forward:
            worker.memory_bytes += worker.flight_bytes[operation.chunk]
            worker.peak_bytes = max(worker.peak_bytes, worker.memory_bytes)
        seconds = worker.seconds[operation.chunk][0 if operation.forward else 1]
        start_s = self.now
        self._at(start_s + seconds, lambda: self._computed(worker, operation, start_s))

    def _expected(self, worker: _Worker, operation: Operation) -> int:
        link = self._incoming(worker.stage, operation)
        if link is None:
            return 0
        transfers = self.forward[link] if operation.forward else self.backward[link]
        return sum(transfer.destination == worker.index for transfer in transfers)

    def _incoming(self, stage: int, operation: Operation) -> int | None:
        """The boundary (an index into self.forward) that an operation's input comes over; None for the first input."""
        last = len(self.plan.stages) - 1
        if operation.forward:
            return stage - 1 if stage else last if operation.chunk else None
        return stage if stage < last else last if operation.chunk < self.chunks - 1 else None

    def _outgoing(self, stage: int, operation: Operation) -> tuple[int, int, Operation] | None:
        """The boundary, the stage and the operation there that an operation's output is for; None at the ends."""
        last = len(self.plan.stages) - 1
        m, chunk = operation.microbatch, operation.chunk
        if operation.forward:
            if stage < last:
                return stage, stage + 1, operation
            return (last, 0, Operation(True, m, chunk + 1)) if chunk < self.chunks - 1 else None
        if stage:
            return stage - 1, stage - 1, operation
        return (last, last, Operation(False, m, chunk - 1)) if chunk else None

    def _computed(self, worker: _Worker, operation: Operation, start_s: float) -> None:
        worker.busy = False
        worker.free_s = self.now
        worker.compute_s += self.now - start_s
        worker.next += 1
        kind = FORWARD if operation.forward else BACKWARD
        for device in worker.devices:
            self.events.append(
                Event(device, kind, worker.stage, start_s, self.now, operation.microbatch, operation.chunk)
            )
        if not operation.forward:
            worker.memory_bytes -= worker.flight_bytes[operation.chunk]
        self._hand_on(worker, operation)
        if worker.next == len(worker.order) and not worker.unsent:
            self._finished(worker.stage)
        self._continue(worker)

    def _hand_on(self, worker: _Worker, operation: Operation) -> None:
        outgoing = self._outgoing(worker.stage, operation)
        if outgoing is None:
            return
        link, stage, consumer = outgoing
        # The layer whose output is sent (or whose output's gradient is): the sender's last, or the receiver's.
        run = self.runs[worker.stage][operation.chunk] if operation.forward else self.runs[stage][consumer.chunk]
        for transfer in self.forward[link] if operation.forward else self.backward[link]:
            if transfer.source == worker.index:
                receiver = self.workers[stage][transfer.destination]
                size = transfer.samples * self.outputs[run[1] - 1]
                sent = (worker.devices[0], receiver.devices[0], operation.forward, operation.microbatch, self.now)
                arrived = partial(self._arrived, worker, receiver, consumer, sent, size)
                worker.unsent += not operation.forward
                self._send(size, transfer.resources, transfer.latency_s, arrived)

    def _arrived(
        self,
        worker: _Worker,
        receiver: _Worker,
        consumer: Operation,
        sent: tuple[int, int, bool, int, float],
        size: int,
    ) -> None:
        left_s = sent[-1]
        self.sent.append(Sent(*sent, self.now, size))
        count, latest_s = receiver.arrived.get(consumer, (0, left_s))
        receiver.arrived[consumer] = (count + 1, max(latest_s, left_s))
        self._continue(receiver)
        if not consumer.forward:
            worker.unsent -= 1
            if worker.next == len(worker.order) and not worker.unsent:
                self._finished(worker.stage)

    # --- the end of a step ---

    def _finished(self, stage: int) -> None:
        """One more replica of a stage has no operations left and has sent all gradients."""
        self.unfinished[stage] -= 1
        if self.unfinished[stage]:
            return
        edges = self.rings[stage] if not self.plan.settings.shard_parameters else []
        if not edges:
            self._optimize(stage)
            return
        replicas = self.plan.stages[stage].replicas
        dp, tp = len(replicas), replicas[0].tp
        shard = self._shard_bytes(stage)
        latency_s = 2 * (dp - 1) * max(edge.latency_s for edge in edges)
        start_s, left = self.now, [len(edges)]

        def arrived() -> None:
            left[0] -= 1
            if left[0]:
                return
            for worker in self.workers[stage]:
                worker.exposed_s += self.now - start_s
                for device in worker.devices:
                    self.events.append(Event(device, ALL_REDUCE, stage, start_s, self.now))
            self._optimize(stage)

        for edge in edges:
            parts = 1 if traffic.inside_node(edge) else tp  # each of a replica's devices has its own port, not link
            self._send(2 * (dp - 1) / dp * shard * parts, edge.resources, latency_s, arrived)

    def _shard_bytes(self, stage: int) -> float:
        return max(
            sum(float(table.shard_bytes[run]) for run in self.runs[stage])
            for index in range(self.plan.stages[stage].dp)
            for table in replica_tables(self.tables, self.cluster, self.plan.stages[stage], index)
        )

    def _optimize(self, stage: int) -> None:
        start_s = self.now
        for worker in self.workers[stage]:
            seconds = max(
                sum(float(table.optimizer_s[run]) for run in self.runs[stage])
                for table in replica_tables(self.tables, self.cluster, self.plan.stages[stage], worker.index)
            )
            worker.compute_s += seconds
            for device in worker.devices:
                self.events.append(Event(device, OPTIMIZER, stage, start_s, start_s + seconds))
            self._at(start_s + seconds, lambda: None)
