"""A training step, event by event: the truth that cost models and searches are held to.

Every replica computes its operations in the order of the schedule, one at a time, each as soon as what it needs has
arrived. Activations and their gradients travel while others compute; what a replica sends to another goes in order,
one micro-batch at a time, and shares links and ports fairly with everything that travels at the same time (flows.py).
A transfer arrives its path's latency after its last byte has left. When all replicas of a stage have computed their
last backward and sent its gradients, rings all-reduce their own gradients, and the optimizer runs. Tensor parallelism's
communication is part of a profile's times.

Parameters sharded over replicas (ZeRO 3) are gathered before each forward and each backward, and gradients scattered
after each backward, within the operation's time and without contention.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ..cluster import Cluster
from .flows import Flow, FlowNetwork, Loads
from .layer_tables import LayerTables
from .plan import ParallelPlan
from .profiles import Profiles
from .schedule import Operation, operations
from .step_work import StepWork, Worker, step_work
from .traffic import Transfer

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
    """A part of a micro-batch's activation (forward) or gradient, between the first devices of two replicas, from when
    it was computed until it arrived."""

    source_device: int
    destination_device: int
    forward: bool
    microbatch: int
    start_s: float
    end_s: float
    bytes: float


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
    return run(step_work(plan, cluster, LayerTables(profiles, plan.settings)))


def run(work: StepWork) -> Step:
    """Run what a step is made of."""
    return _Run(work).step()


@dataclass(eq=False)
class _Worker:
    """A worker with what it still has to do."""

    work: Worker
    stage: int
    order: list[Operation]
    memory_bytes: float
    peak_bytes: float
    next: int = 0
    busy: bool = False
    free_s: float = 0.0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    unsent: int = 0  # gradients on their way
    forwards: int = 0  # transfers that make one activation, or one gradient
    backwards: int = 0
    arrived: dict[Operation, tuple[int, float]] = field(default_factory=dict)  # how many, and when the last one left


@dataclass(eq=False)
class _Channel:
    """Transfers from one worker to another over one boundary, in order."""

    loads: Loads
    latency_s: float
    sender: _Worker
    receiver: _Worker
    waiting: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)
    busy: bool = False


_Channels = dict[_Worker, list[tuple[_Channel, float]]]  # by sender, with the size of a transfer in samples


def _channels(senders: list[_Worker], receivers: list[_Worker], transfers: tuple[Transfer, ...]) -> _Channels:
    channels: _Channels = {worker: [] for worker in senders}
    for t in transfers:
        sender = senders[t.source]
        channels[sender].append((_Channel(t.loads, t.latency_s, sender, receivers[t.destination]), t.size))
    return channels


class _Run:
    def __init__(self, work: StepWork) -> None:
        self.work = work
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.events: list[Event] = []
        self.sent: list[Sent] = []
        self.network = FlowNetwork(work.capacity)
        self.ends: dict[Flow, Callable[[], None]] = {}
        self.unfinished = [len(stage) for stage in work.workers]
        self.workers = []
        for number, stage in enumerate(work.workers):
            order = operations(work.schedule, number, work.stages, work.microbatches, work.chunks)
            self.workers.append([_Worker(w, number, order, w.fixed_bytes, w.fixed_bytes) for w in stage])
        self.forward: list[_Channels] = []
        self.backward: list[_Channels] = []
        for number, boundary in enumerate(work.boundaries):
            source, destination = self.workers[number], self.workers[(number + 1) % work.stages]
            self.forward.append(_channels(source, destination, boundary.forward))
            self.backward.append(_channels(destination, source, boundary.backward))
            for index, worker in enumerate(destination):
                worker.forwards = sum(t.destination == index for t in boundary.forward)
            for index, worker in enumerate(source):
                worker.backwards = sum(t.destination == index for t in boundary.backward)

    def step(self) -> Step:
        for stage in self.workers:
            for worker in stage:
                self._continue(worker)
        while self.queue:
            self.now, _, action = heapq.heappop(self.queue)
            action()
            if not self.queue or self.queue[0][0] > self.now:
                for flow in self.network.settle(self.now):
                    self._at(flow.end_s, partial(self._flow_ended, flow, flow.version))
        compute, exposed, memory = {}, {}, {}
        for stage in self.workers:
            for worker in stage:
                assert worker.next == len(worker.order)  # the schedules have no deadlock
                for device in worker.work.devices:
                    compute[device] = worker.compute_s
                    exposed[device] = worker.exposed_s
                    memory[device] = round(worker.peak_bytes)
        end_s = max(event.end_s for event in self.events)
        return Step(end_s, tuple(self.events), tuple(self.sent), compute, exposed, memory)

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (time_s, self.count, action))

    # --- sending ---

    def _flow(self, size: float, loads: Loads, ended: Callable[[], None]) -> None:
        flow = Flow(size, loads)
        self.ends[flow] = ended
        self.network.start(flow, self.now)

    def _flow_ended(self, flow: Flow, version: int) -> None:
        if version == flow.version and flow in self.ends:
            self.network.end(flow)
            self.ends.pop(flow)()

    def _send(self, channel: _Channel, size: float, arrived: Callable[[], None]) -> None:
        channel.waiting.append((size, arrived))
        if not channel.busy:
            self._send_next(channel)

    def _send_next(self, channel: _Channel) -> None:
        channel.busy = bool(channel.waiting)
        if channel.busy:
            size, arrived = channel.waiting.popleft()
            if size > 0:
                self._flow(size, channel.loads, partial(self._left, channel, arrived))
            else:
                self._left(channel, arrived)

    def _left(self, channel: _Channel, arrived: Callable[[], None]) -> None:
        self._at(self.now + channel.latency_s, arrived)
        self._send_next(channel)

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
        chunk = operation.chunk
        if operation.forward:
            worker.memory_bytes += worker.work.flight_bytes[chunk]
            worker.peak_bytes = max(worker.peak_bytes, worker.memory_bytes)
        seconds = worker.work.forward_s[chunk] if operation.forward else worker.work.backward_s[chunk]
        self._at(self.now + seconds, partial(self._computed, worker, operation, self.now))

    def _expected(self, worker: _Worker, operation: Operation) -> int:
        """How many transfers an operation waits for."""
        forward, chunk, last = operation.forward, operation.chunk, self.work.stages - 1
        if forward and not worker.stage and not chunk:
            return 0
        if not forward and worker.stage == last and chunk == self.work.chunks - 1:
            return 0
        return worker.forwards if forward else worker.backwards

    def _outgoing(self, stage: int, operation: Operation) -> tuple[int, Operation] | None:
        """The boundary that an operation's output leaves over and the operation that it is for; None at the ends."""
        last, chunk = self.work.stages - 1, operation.chunk
        if operation.forward:
            if stage < last:
                return stage, operation
            after = Operation(True, operation.microbatch, chunk + 1)
            return (last, after) if after.chunk < self.work.chunks else None
        if stage:
            return stage - 1, operation
        return (last, Operation(False, operation.microbatch, chunk - 1)) if chunk else None

    def _computed(self, worker: _Worker, operation: Operation, start_s: float) -> None:
        worker.busy = False
        worker.free_s = self.now
        worker.compute_s += self.now - start_s
        worker.next += 1
        self._record(worker, FORWARD if operation.forward else BACKWARD, start_s, self.now, operation)
        if not operation.forward:
            worker.memory_bytes -= worker.work.flight_bytes[operation.chunk]
        outgoing = self._outgoing(worker.stage, operation)
        if outgoing is not None:
            self._hand_on(worker, operation, *outgoing)
        if worker.next == len(worker.order) and not worker.unsent:
            self._finished(worker.stage)
        self._continue(worker)

    def _hand_on(self, worker: _Worker, operation: Operation, boundary: int, consumer: Operation) -> None:
        sample_bytes = self.work.boundaries[boundary].sample_bytes[
            operation.chunk if operation.forward else consumer.chunk
        ]
        channels = self.forward[boundary] if operation.forward else self.backward[boundary]
        for channel, samples in channels[worker]:
            worker.unsent += not operation.forward
            size = samples * sample_bytes
            self._send(channel, size, partial(self._arrived, channel, consumer, self.now, size))

    def _arrived(self, channel: _Channel, consumer: Operation, computed_s: float, size: float) -> None:
        sender, receiver = channel.sender, channel.receiver
        ends = (sender.work.devices[0], receiver.work.devices[0])
        self.sent.append(Sent(*ends, consumer.forward, consumer.microbatch, computed_s, self.now, size))
        count, left_s = receiver.arrived.get(consumer, (0, computed_s))
        receiver.arrived[consumer] = (count + 1, max(left_s, computed_s))
        self._continue(receiver)
        if not consumer.forward:
            sender.unsent -= 1
            if sender.next == len(sender.order) and not sender.unsent:
                self._finished(sender.stage)

    def _record(
        self, worker: _Worker, kind: str, start_s: float, end_s: float, operation: Operation | None = None
    ) -> None:
        microbatch, chunk = (operation.microbatch, operation.chunk) if operation else (-1, -1)
        for device in worker.work.devices:
            self.events.append(Event(device, kind, worker.stage, start_s, end_s, microbatch, chunk))

    # --- the end of a step ---

    def _finished(self, stage: int) -> None:
        """One more worker of a stage has no operations left and has sent all gradients."""
        self.unfinished[stage] -= 1
        if self.unfinished[stage]:
            return
        ring = self.work.rings[stage]
        left = [len(ring.edges)]
        if not ring.edges:
            self._optimize(stage)
        for edge in ring.edges:
            self._flow(
                max(2 * edge.size * ring.shard_bytes, 1.0), edge.loads, partial(self._reduced, stage, left, self.now)
            )

    def _reduced(self, stage: int, left: list[int], start_s: float) -> None:
        left[0] -= 1
        if not left[0]:
            self._at(self.now + 2 * self.work.rings[stage].latency_s, partial(self._all_reduced, stage, start_s))

    def _all_reduced(self, stage: int, start_s: float) -> None:
        for worker in self.workers[stage]:
            worker.exposed_s += self.now - start_s
            self._record(worker, ALL_REDUCE, start_s, self.now)
        self._optimize(stage)

    def _optimize(self, stage: int) -> None:
        for worker in self.workers[stage]:
            worker.compute_s += worker.work.optimizer_s
            end_s = self.now + worker.work.optimizer_s
            self._record(worker, OPTIMIZER, self.now, end_s)
