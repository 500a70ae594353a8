"""Jobs on a network, flow by flow: every start and end of a flow is an event, and so is every iteration's compute."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import PlanningError
from ..cluster import Cluster, Path
from .fairness import Usage, fair_rates
from .job import Job, check_magnitude, check_names, intensity_flop_per_s
from .policy import Alignment, Policy, Snapshot
from .streams import Streams, streams_of

_BEGIN, _SEND, _COMPUTED, _LEAVE = range(4)  # timers of a job
_REMEMBERED = 1024  # sets of active streams whose rates are kept


@dataclass(frozen=True)
class Submission:
    """A job that comes at arrival_s, and leaves after so many iterations (None: does not) or at leaves_s."""

    job: Job
    arrival_s: float = 0.0
    iterations: int | None = None
    leaves_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.arrival_s < math.inf or (self.iterations is not None and self.iterations < 1):
            raise PlanningError(
                f"job {self.job.name}: arrival_s is {self.arrival_s}, iterations is {self.iterations}; "
                "an arrival is not before 0, and a job has at least one iteration"
            )
        if not self.leaves_s > self.arrival_s:
            raise PlanningError(f"job {self.job.name}: it leaves at {self.leaves_s} s, and comes at {self.arrival_s} s")


@dataclass(frozen=True)
class JobOutcome:
    name: str
    arrival_s: float
    left_s: float | None  # None: still there at the end
    iterations: int  # whole ones

    @property
    def completion_s(self) -> float | None:
        return None if self.left_s is None else self.left_s - self.arrival_s


@dataclass(frozen=True)
class Outcome:
    end_s: float
    jobs: tuple[JobOutcome, ...]  # in order of submission
    computed_flop: float  # U_T
    busy_gpu_s: float
    held_gpu_s: float
    flow_events: int  # starts and ends of flows
    decisions: int
    largest_gap_share: float  # max over T of |U_T - F_T| / sum of W_j: at most 1, by Crux's theorem 1

    @property
    def utilisation(self) -> float:
        """The share of the jobs' GPU time that computes."""
        return self.busy_gpu_s / self.held_gpu_s if self.held_gpu_s else 0.0


def simulate(
    cluster: Cluster,
    submissions: Sequence[Submission],
    policy: Policy,
    levels: int,
    end_s: float,
    seed: int = 0,
) -> Outcome:
    """Run jobs until end_s, or until the last has left; the policy decides anew at each arrival and completion.

    New levels hold at once; new paths from a job's next traffic on, new alignments for its next iteration. Flows are
    fluids without latency, max-min fair within a level, strict between levels.
    What ends at end_s counts, what would arrive then does not. PlanningError for numbers too large to be added up.
    At every event |U_T - F_T| <= sum of W_j is asserted, over the jobs that send, as F has no others.
    """
    check_names([submission.job for submission in submissions])
    if not 0 < end_s < math.inf:
        raise PlanningError(f"a simulation of {end_s} s; give a positive time")
    for submission in submissions:
        job = submission.job
        check_magnitude(job, f"flop computed alone in {end_s:g} s", job.compute_flop * max(1.0, end_s / job.compute_s))
    return _Simulation(cluster, submissions, policy, levels, end_s, seed).run()


class _Running:
    """A job that is there. What it has under way are views of the simulation's arrays."""

    def __init__(self, submission: Submission, number: int) -> None:
        self.submission, self.number = submission, number
        self.job = submission.job
        self.flop_per_s = self.job.compute_flop / self.job.compute_s
        self.paths: tuple[Path, ...] = ()
        self.next_paths: tuple[Path, ...] = ()
        self.alignment: Alignment | None = None  # yet to be followed
        self.level = 0
        self.iterations = 0
        self.computing = self.sent = self.gone = False
        self.pending = 0  # streams
        self.streams: Streams
        self.remaining_bytes = np.zeros(0)
        self.active = np.zeros(0, dtype=bool)


class _Simulation:
    def __init__(
        self,
        cluster: Cluster,
        submissions: Sequence[Submission],
        policy: Policy,
        levels: int,
        end_s: float,
        seed: int,
    ) -> None:
        self.cluster, self.policy, self.levels, self.end_s, self.seed = cluster, policy, levels, end_s, seed
        self.submissions = submissions
        self.last_arrival_s = math.nextafter(end_s, 0.0)
        order = sorted(submissions, key=lambda s: (s.arrival_s, s.job.name))
        self.waiting = [_Running(submission, number) for number, submission in enumerate(order)][::-1]
        self.bandwidths_bytes_per_s = np.array([link.bandwidth_bytes_per_s for link in cluster.links])
        self.streams_of: dict[tuple[str, tuple[Path, ...]], Streams] = {}
        self.alignments: dict[str, Alignment] = {}
        self.now_s = self.settled_s = 0.0
        self.running: list[_Running] = []
        self.timers: list[tuple[float, int, int, _Running]] = []  # a heap: time, kind, number of the job
        self.left_s: dict[str, float] = {}
        self.iterations: dict[str, int] = {}
        self.flow_events = self.decisions = 0
        self.computed_flop = self.busy_gpu_s = self.held_gpu_s = 0.0
        self.senders_flop = self.transmitted_flop = 0.0  # U and F of the jobs that send
        self.broken_off_flop = 0.0  # W of jobs that left within an iteration
        self.largest_gap_share = 0.0
        self.rates = np.zeros(0)
        self.remaining_bytes = np.zeros(0)
        self._lay_out()
        self._update_rates()

    def run(self) -> Outcome:
        while self.running or self.waiting:
            next_s = min(self.end_s, self.next_finish_s)
            if self.timers:
                next_s = min(next_s, self.timers[0][0])
            if self.waiting:
                next_s = min(next_s, self.waiting[-1].submission.arrival_s)
            self._advance(next_s)
            self._step()
            if self.now_s >= self.end_s:
                break
        for job in self.running:
            self.iterations[job.job.name] = job.iterations
        outcomes = tuple(
            JobOutcome(s.job.name, s.arrival_s, self.left_s.get(s.job.name), self.iterations.get(s.job.name, 0))
            for s in self.submissions
        )
        return Outcome(
            self.now_s,
            outcomes,
            self.computed_flop,
            self.busy_gpu_s,
            self.held_gpu_s,
            self.flow_events,
            self.decisions,
            self.largest_gap_share,
        )

    def _advance(self, next_s: float) -> None:
        passed_s = next_s - self.now_s
        self.now_s = next_s
        self.transmitted_flop += passed_s * self.transmit_flop_per_s
        self.computed_flop += passed_s * self.compute_flop_per_s
        self.senders_flop += passed_s * self.senders_flop_per_s
        self.busy_gpu_s += passed_s * self.busy_gpus
        self.held_gpu_s += passed_s * self.held_gpus
        bound = self.senders_iteration_flop + self.broken_off_flop
        if bound:
            share = abs(self.senders_flop - self.transmitted_flop) / bound
            assert share <= 1 + 1e-6, f"theorem 1 at {self.now_s} s: |U - F| is {share} of the sum of W"
            self.largest_gap_share = max(self.largest_gap_share, share)

    def _step(self) -> None:
        """Everything that happens now; what rounding sets a little apart happens together."""
        latest_s = self.now_s * (1 + 1e-12) + 1e-15
        touched: dict[int, _Running] = {}
        stale = False
        if self.next_finish_s <= latest_s:
            for job in self._finish(np.flatnonzero(self.finish_s <= latest_s)):
                touched[job.number] = job
            stale = True
        while self.timers and self.timers[0][0] <= latest_s:
            _, kind, number, job = heapq.heappop(self.timers)
            if job.gone:
                continue
            touched[number] = job
            if kind == _BEGIN:
                self._begin(job)
            elif kind == _COMPUTED:
                job.computing = False
                self._count_computing()
            elif kind == _SEND:
                stale |= self._send(job)
        gone = []
        for _, job in sorted(touched.items()):
            ended = job.sent and not job.pending and not job.computing
            if ended:
                job.iterations += 1
                job.sent = False
            if job.iterations == job.submission.iterations or job.submission.leaves_s <= latest_s:
                gone.append(job)
                if job.job.flows and not ended:
                    self.broken_off_flop += job.job.compute_flop
            elif ended:
                self._begin_next(job)
        arrived = []
        while self.waiting and self.waiting[-1].submission.arrival_s <= min(latest_s, self.last_arrival_s):
            arrived.append(self.waiting.pop())
        if gone or arrived:
            for job in gone:
                job.gone = True
                self.left_s[job.job.name] = self.now_s
                self.iterations[job.job.name] = job.iterations
            self._decide(arrived)
            stale = True
        if stale:
            self._update_rates()

    def _finish(self, done: NDArray[np.int64]) -> list[_Running]:
        """End these streams; the jobs that they are of."""
        self._settle()
        self.remaining_bytes[done] = 0.0
        self.active[done] = False
        self.flow_events += int(self.flows[done].sum())
        counts = np.bincount(self.owner[done], minlength=len(self.running))
        jobs = []
        for index in np.flatnonzero(counts).tolist():
            self.running[index].pending -= int(counts[index])
            jobs.append(self.running[index])
        return jobs

    def _begin_next(self, job: _Running) -> None:
        """At once, or when the policy's alignment says."""
        alignment, job.alignment = job.alignment, None
        wait_s = (alignment.offset_s - self.now_s) % alignment.period_s if alignment else 0.0
        if wait_s > 0:
            self._at(self.now_s + wait_s, _BEGIN, job)
        else:
            self._begin(job)

    def _begin(self, job: _Running) -> None:
        job.computing = True
        self._count_computing()
        compute_s = job.job.compute_s
        self._at(self.now_s + compute_s, _COMPUTED, job)
        self._at(self.now_s + job.job.overlap_start * compute_s, _SEND, job)

    def _at(self, time_s: float, kind: int, job: _Running) -> None:
        heapq.heappush(self.timers, (time_s, kind, job.number, job))

    def _send(self, job: _Running) -> bool:
        """Start the flows of an iteration; whether rates are to be computed anew."""
        changed = job.next_paths != job.paths
        if changed:
            self._adopt_paths(job)
            self._lay_out()
        job.sent = True
        job.pending = len(job.streams.flows)
        self.flow_events += len(job.job.flows)
        job.remaining_bytes[:] = job.streams.size_bytes
        job.active[:] = True
        return changed or job.pending > 0

    def _adopt_paths(self, job: _Running) -> None:
        """For a job that sends nothing just now."""
        job.paths = job.next_paths
        key = (job.job.name, job.paths)
        if key not in self.streams_of:
            if job.job.flows:
                intensity = intensity_flop_per_s(self.cluster, job.job, job.paths)
                check_magnitude(job.job, f"flop sent alone in {self.end_s:g} s", intensity * self.end_s)
            self.streams_of[key] = streams_of(self.cluster, job.job, job.paths)
        job.streams = self.streams_of[key]
        job.remaining_bytes = np.zeros(len(job.streams.flows))
        job.active = np.zeros(len(job.streams.flows), dtype=bool)

    def _decide(self, arrived: list[_Running]) -> None:
        self._settle()
        self.running = [job for job in self.running if not job.gone] + arrived
        self._ask_policy()
        for job in arrived:
            self._adopt_paths(job)
        self._lay_out()
        for job in arrived:
            self._begin_next(job)
            if job.submission.leaves_s < self.end_s:
                self._at(job.submission.leaves_s, _LEAVE, job)

    def _ask_policy(self) -> None:
        if not self.running:
            return
        names = [job.job.name for job in self.running]
        known = {name: self.alignments[name] for name in names if name in self.alignments}
        jobs = tuple(job.job for job in self.running)
        decision = self.policy(Snapshot(self.cluster, jobs, self.levels, self.seed, known))
        self.decisions += 1
        for name in names:
            if name not in decision.routes or name not in decision.levels:
                raise PlanningError(f"the policy gave job {name} no paths or no level; it must decide about every job")
        for job in self.running:
            name = job.job.name
            job.next_paths, job.level = tuple(decision.routes[name]), decision.levels[name]
            alignment = decision.alignments.get(name)
            if alignment != known.get(name):
                job.alignment = alignment
        self.alignments = dict(decision.alignments)

    def _count_computing(self) -> None:
        computing = [job for job in self.running if job.computing]
        self.compute_flop_per_s = sum(job.flop_per_s for job in computing)
        self.senders_flop_per_s = sum(job.flop_per_s for job in computing if job.job.flows)
        self.busy_gpus = sum(job.job.gpus for job in computing)

    def _lay_out(self) -> None:
        """Arrays over all jobs and their streams, of which each job's own are views.

        A link that only one stream uses limits it alone, as a link of its own does, which every stream has.
        """
        self._settle()
        jobs = self.running
        self.held_gpus = sum(job.job.gpus for job in jobs)
        self.senders_iteration_flop = sum(job.job.compute_flop for job in jobs if job.job.flows)
        self._count_computing()
        every = [job.streams for job in jobs]
        counts = [len(streams.flows) for streams in every]
        firsts = np.cumsum([0, *counts])
        self.owner = np.repeat(np.arange(len(jobs)), counts)
        self.flows = _joined([streams.flows for streams in every], np.int64)
        self.flop_per_byte = _joined([streams.flop_per_byte for streams in every])
        self.remaining_bytes = _joined([job.remaining_bytes for job in jobs])
        self.active = _joined([job.active for job in jobs], np.bool_)
        for job, first, count in zip(jobs, firsts, counts, strict=False):
            job.remaining_bytes = self.remaining_bytes[first : first + count]
            job.active = self.active[first : first + count]
        self.level_of = np.array([job.level for job in jobs], dtype=np.int64)[self.owner]
        self.rates = np.zeros(len(self.owner))
        streams = _joined([streams.streams + first for streams, first in zip(every, firsts, strict=False)], np.int64)
        links = _joined([streams.links for streams in every], np.int64)
        weights = _joined([streams.weights for streams in every])
        alone = np.bincount(links, minlength=len(self.bandwidths_bytes_per_s))[links] == 1
        most = _joined([streams.own_bytes_per_s for streams in every])
        np.minimum.at(most, streams[alone], self.bandwidths_bytes_per_s[links[alone]] / weights[alone])
        streams, links, weights = streams[~alone], links[~alone], weights[~alone]
        first = _first_alike(streams, links, weights / self.bandwidths_bytes_per_s[links])
        streams, links, weights = streams[first], links[first], weights[first]
        shared, numbers = np.unique(links, return_inverse=True)
        own = np.arange(len(self.owner))
        order = np.argsort(np.concatenate([streams, own]), kind="stable")
        self.usage = Usage(
            np.concatenate([streams, own])[order],
            np.concatenate([numbers, len(shared) + own])[order],
            np.concatenate([weights, np.ones(len(own))])[order],
        )
        self.limits_bytes_per_s = np.concatenate([self.bandwidths_bytes_per_s[shared], most])
        self.known: dict[bytes, tuple[NDArray[np.float64], float]] = {}

    def _settle(self) -> None:
        """Take what was sent since the last time from what remains."""
        self.remaining_bytes -= self.rates * (self.now_s - self.settled_s)
        self.settled_s = self.now_s

    def _update_rates(self) -> None:
        self._settle()
        key = self.active.tobytes()
        if key not in self.known:
            if len(self.known) >= _REMEMBERED:
                self.known.clear()
            rates = fair_rates(self.usage.of(self.active), self.level_of, self.limits_bytes_per_s)
            self.known[key] = rates, float(rates @ self.flop_per_byte)
        self.rates, self.transmit_flop_per_s = self.known[key]
        self.finish_s = np.full(len(self.rates), np.inf)
        flowing = self.rates > 0
        left_bytes = np.maximum(self.remaining_bytes[flowing], 0.0)
        self.finish_s[flowing] = self.now_s + left_bytes / self.rates[flowing]
        self.next_finish_s = float(self.finish_s.min(initial=np.inf))


def _joined(parts: Sequence[NDArray[Any]], dtype: type = np.float64) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts])


def _first_alike(
    streams: NDArray[np.int64], links: NDArray[np.int64], seconds: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """The entries to keep: of links on which the same streams' bytes take the same time, one limits as all do.

    Links are compared by a checksum of 64 bits over their entries.
    """
    if not len(links):
        return np.zeros(0, dtype=np.bool_)
    mixed = seconds.view(np.uint64) ^ (streams.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(31)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    order = np.argsort(links, kind="stable")
    starts = np.flatnonzero(np.diff(links[order], prepend=-1))
    checksums = np.add.reduceat(mixed[order], starts)
    kept = np.zeros(int(links.max()) + 1, dtype=np.bool_)
    kept[links[order[starts[np.unique(checksums, return_index=True)[1]]]]] = True
    return kept[links]
