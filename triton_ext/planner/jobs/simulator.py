"""Jobs on a network, flow by flow: every start and end of a flow is an event, and so is every iteration's compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import PlanningError
from .fairness import fair_rates
from .job import Job, check_names, load_s
from .network import Network, Path
from .policy import Alignment, Policy, Snapshot

_BEGIN, _SEND, _COMPUTED = range(3)  # timers of a job
_REMEMBERED = 1024  # sets of active flows whose rates are kept


@dataclass(frozen=True)
class Submission:
    """A job that comes at arrival_s and leaves after so many iterations; None: it stays."""

    job: Job
    arrival_s: float = 0.0
    iterations: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.arrival_s < math.inf or (self.iterations is not None and self.iterations < 1):
            raise PlanningError(
                f"job {self.job.name}: arrival_s = {self.arrival_s}, iterations = {self.iterations}; "
                "an arrival is not before 0, and a job has at least one iteration"
            )


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
    network: Network,
    submissions: Sequence[Submission],
    policy: Policy,
    levels: int,
    end_s: float,
    seed: int = 0,
) -> Outcome:
    """Run jobs until end_s, or until the last has left; the policy decides anew at each arrival and completion.

    New levels hold at once; new paths from a job's next traffic on, new alignments for its next iteration.
    At every event |U_T - F_T| <= sum of W_j is asserted (over jobs that send, as F has no others).
    """
    check_names([submission.job for submission in submissions])
    if not 0 < end_s < math.inf:
        raise PlanningError(f"a simulation of {end_s} s; give a positive time")
    return _Simulation(network, submissions, policy, levels, end_s, seed).run()


class _Running:
    """A job that is there. Its flows within a node take no time and are left out."""

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.job = submission.job
        self.paths: tuple[Path, ...] = ()
        self.next_paths: tuple[Path, ...] = ()
        self.alignment: Alignment | None = None
        self.level = 0
        self.iterations = 0
        self.sent = False
        self.pending = 0
        self.links: list[Path] = []
        self.size_bytes = np.zeros(0)
        self.remaining_bytes = np.zeros(0)
        self.active = np.zeros(0, dtype=bool)
        self.flop_per_byte = np.zeros(0)  # of F, for the flows on the slowest link

    def adopt_paths(self, network: Network) -> None:
        self.paths = self.next_paths
        kept = [(flow, path) for flow, path in zip(self.job.flows, self.paths, strict=True) if path]
        self.links = [path for _, path in kept]
        self.size_bytes = np.array([flow.size_bytes for flow, _ in kept])
        self.remaining_bytes = np.zeros(len(kept))
        self.active = np.zeros(len(kept), dtype=bool)
        loads_s = load_s(network, self.job, self.paths)
        self.flop_per_byte = np.zeros(len(kept))
        if loads_s:
            slowest = max(loads_s, key=lambda link: (loads_s[link], -link))
            on = np.array([slowest in path for path in self.links])
            self.flop_per_byte[on] = self.job.compute_flop / self.size_bytes[on].sum()


class _Simulation:
    def __init__(
        self,
        network: Network,
        submissions: Sequence[Submission],
        policy: Policy,
        levels: int,
        end_s: float,
        seed: int,
    ) -> None:
        self.network, self.policy, self.levels, self.end_s, self.seed = network, policy, levels, end_s, seed
        self.submissions = submissions
        self.waiting = sorted(submissions, key=lambda s: (s.arrival_s, s.job.name), reverse=True)
        self.capacities = np.array([link.capacity_bytes_per_second for link in network.links])
        self.now_s = 0.0
        self.running: list[_Running] = []
        self.left_s: dict[str, float] = {}
        self.iterations: dict[str, int] = {}
        self.flow_events = self.decisions = 0
        self.computed_flop = self.busy_gpu_s = self.held_gpu_s = 0.0
        self.senders_flop = self.transmitted_flop = 0.0  # U and F of the jobs that send
        self.largest_gap_share = 0.0
        self.timers_s = np.full((3, 0), np.inf)  # by kind and job
        self.computing = np.zeros(0, dtype=bool)
        self._lay_out()

    def run(self) -> Outcome:
        while self.running or self.waiting:
            next_s = min(self.end_s, self.timers_s.min(initial=np.inf), self.finish_s.min(initial=np.inf))
            if self.waiting:
                next_s = min(next_s, self.waiting[-1].arrival_s)
            self._advance(next_s)
            if self.now_s >= self.end_s:
                break
            self._step()
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
        if passed_s > 0:
            self.remaining_bytes -= self.rates * passed_s
            self.transmitted_flop += passed_s * self.transmit_flop_per_s
            flop_per_s = self.flop_per_s * self.computing
            self.computed_flop += passed_s * float(flop_per_s.sum())
            self.senders_flop += passed_s * float(flop_per_s @ self.sends)
            self.busy_gpu_s += passed_s * float(self.gpus @ self.computing)
            self.held_gpu_s += passed_s * float(self.gpus.sum())
        bound = self.senders_iteration_flop
        if bound:
            share = abs(self.senders_flop - self.transmitted_flop) / bound
            assert share <= 1 + 1e-6, f"theorem 1 at {self.now_s} s: |U - F| is {share} of the sum of W"
            self.largest_gap_share = max(self.largest_gap_share, share)

    def _step(self) -> None:
        latest_s = self.now_s * (1 + 1e-12) + 1e-15
        touched: set[int] = set()
        stale = False
        done = np.flatnonzero(self.finish_s <= latest_s)
        if len(done):
            self.remaining_bytes[done] = 0.0
            self.active[done] = False
            self.finish_s[done] = np.inf
            self.flow_events += len(done)
            counts = np.bincount(self.owner[done], minlength=len(self.running))
            for index in np.flatnonzero(counts).tolist():
                self.running[index].pending -= int(counts[index])
                touched.add(index)
            stale = True
        if self.timers_s.min(initial=np.inf) <= latest_s:
            for kind, index in np.argwhere(self.timers_s <= latest_s).tolist():
                self.timers_s[kind, index] = np.inf
                touched.add(index)
                if kind == _BEGIN:
                    self._begin(index)
                elif kind == _COMPUTED:
                    self.computing[index] = False
                else:
                    stale |= self._send(index)
        gone = []
        for index in sorted(touched):
            job = self.running[index]
            if job.sent and not job.pending and not self.computing[index]:
                job.iterations += 1
                job.sent = False
                if job.iterations == job.submission.iterations:
                    gone.append(job)
                else:
                    self._begin_next(index)
        arrived = []
        while self.waiting and self.waiting[-1].arrival_s <= latest_s:
            arrived.append(_Running(self.waiting.pop()))
        if gone or arrived:
            for job in gone:
                self.left_s[job.job.name] = self.now_s
                self.iterations[job.job.name] = job.iterations
            self._decide([job for job in self.running if job not in gone] + arrived, arrived)
            stale = True
        if stale:
            self._update_rates()

    def _begin_next(self, index: int) -> None:
        """At once, or when the policy's alignment says."""
        alignment = self.running[index].alignment
        self.running[index].alignment = None
        wait_s = (alignment.offset_s - self.now_s) % alignment.period_s if alignment else 0.0
        if wait_s > 0:
            self.timers_s[_BEGIN, index] = self.now_s + wait_s
        else:
            self._begin(index)

    def _begin(self, index: int) -> None:
        job = self.running[index].job
        self.computing[index] = True
        self.timers_s[_COMPUTED, index] = self.now_s + job.compute_s
        self.timers_s[_SEND, index] = self.now_s + job.overlap_start * job.compute_s

    def _send(self, index: int) -> bool:
        """Start the flows of an iteration; whether there are any."""
        job = self.running[index]
        if job.next_paths != job.paths:
            job.adopt_paths(self.network)
            self._lay_out()
        job.sent = True
        job.pending = len(job.links)
        self.flow_events += job.pending
        job.remaining_bytes[:] = job.size_bytes
        job.active[:] = True
        return job.pending > 0

    def _decide(self, jobs: list[_Running], arrived: list[_Running]) -> None:
        timers_s, computing = self.timers_s, self.computing
        before = {job.job.name: index for index, job in enumerate(self.running)}
        self.running = jobs
        self.timers_s = np.full((3, len(jobs)), np.inf)
        self.computing = np.zeros(len(jobs), dtype=bool)
        snapshot = Snapshot(self.network, tuple(job.job for job in jobs), self.levels, self.seed)
        if jobs:
            decision = self.policy(snapshot)
            self.decisions += 1
            for job in jobs:
                name = job.job.name
                job.next_paths, job.level = decision.routes[name], decision.levels[name]
                job.alignment = decision.alignments.get(name)
        for job in arrived:
            job.adopt_paths(self.network)
        self._lay_out()
        for index, job in enumerate(jobs):
            if job in arrived:
                self._begin_next(index)
            else:
                self.timers_s[:, index] = timers_s[:, before[job.job.name]]
                self.computing[index] = computing[before[job.job.name]]

    def _lay_out(self) -> None:
        """Arrays over all flows and jobs, of which each job's own are views."""
        jobs = self.running
        self.gpus = np.array([job.job.gpus for job in jobs], dtype=float)
        self.flop_per_s = np.array([job.job.compute_flop / job.job.compute_s for job in jobs])
        self.sends = np.array([float(bool(job.links)) for job in jobs])
        self.senders_iteration_flop = sum(job.job.compute_flop for job in jobs if job.links)
        counts = [len(job.links) for job in jobs]
        self.owner = np.repeat(np.arange(len(jobs)), counts)
        hops = max((len(path) for job in jobs for path in job.links), default=1)
        pad = len(self.capacities)
        self.links = np.array(
            [[*path, *[pad] * (hops - len(path))] for job in jobs for path in job.links], dtype=np.int64
        ).reshape(-1, hops)
        self.remaining_bytes = np.concatenate([np.zeros(0), *(job.remaining_bytes for job in jobs)])
        self.active = np.concatenate([np.zeros(0, dtype=bool), *(job.active for job in jobs)])
        self.flop_per_byte = np.concatenate([np.zeros(0), *(job.flop_per_byte for job in jobs)])
        self.finish_s = np.full(len(self.owner), np.inf)
        first = 0
        for job, count in zip(jobs, counts, strict=True):
            job.remaining_bytes = self.remaining_bytes[first : first + count]
            job.active = self.active[first : first + count]
            first += count
        self.level_of = np.array([job.level for job in jobs], dtype=np.int64)[self.owner]
        self.known: dict[bytes, tuple[NDArray[np.float64], float]] = {}
        self._update_rates()

    def _update_rates(self) -> None:
        key = self.active.tobytes()
        if key not in self.known:
            if len(self.known) >= _REMEMBERED:
                self.known.clear()
            sending = np.flatnonzero(self.active)
            rates = np.zeros(len(self.active))
            rates[sending] = fair_rates(self.links[sending], self.level_of[sending], self.capacities)
            self.known[key] = rates, float(rates @ self.flop_per_byte)
        self.rates, self.transmit_flop_per_s = self.known[key]
        self.finish_s.fill(np.inf)
        flowing = np.flatnonzero(self.rates)
        self.finish_s[flowing] = self.now_s + np.maximum(self.remaining_bytes[flowing], 0.0) / self.rates[flowing]
