"""Unique priorities: GPU intensity times a factor for how much a job gains from going first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from ..cluster import Cluster
from .job import Job, Routes, check_names, intensity_flop_per_s, transmit_s

WINDOW_HYPER_PERIODS = 12  # long enough for the periods that two orders of a pair settle in
PHASES = 4
_LARGEST_DENOMINATOR = 8  # periods are taken as multiples p / q of each other with q up to this
_LARGEST_RATIO = 64  # and p / q up to this, and p too


@dataclass(frozen=True)
class Cycle:
    """A job as one link sees it: compute, then transmit, again and again."""

    compute_s: float
    communication_s: float
    overlap_start: float = 1.0

    @property
    def period_s(self) -> float:
        return max(self.compute_s, self.overlap_start * self.compute_s + self.communication_s)


@dataclass(frozen=True)
class Share:
    """What a job did within a window."""

    transmit_s: float
    compute_s: float


def share_link(
    first: Cycle, second: Cycle, start_s: float, end_s: float, first_delay_s: float = 0.0, second_delay_s: float = 0.0
) -> tuple[Share, Share]:
    """Two jobs on one link under strict priority from time 0 on; what each did from start_s to end_s.

    `first` has the priority. The delays are when each job starts.
    """
    cycles = (first, second)
    began_s = [first_delay_s, second_delay_s]
    left_s = [first.communication_s, second.communication_s]
    done_s = [[0.0, 0.0], [0.0, 0.0]]  # by job: transmitted, computed
    now_s, tiny_s = 0.0, 1e-12 * end_s

    def ready_s(job: int) -> float:
        return began_s[job] + cycles[job].overlap_start * cycles[job].compute_s

    while now_s < end_s:
        waiting = [job for job in (0, 1) if left_s[job] > tiny_s and ready_s(job) <= now_s + tiny_s]
        sender = waiting[0] if waiting else None
        events = [end_s] if now_s >= start_s else [end_s, start_s]
        for job in (0, 1):
            for moment_s in (began_s[job], ready_s(job), began_s[job] + cycles[job].compute_s):
                if moment_s > now_s + tiny_s:
                    events.append(moment_s)
        if sender is not None:
            events.append(now_s + left_s[sender])
        next_s = min(events)
        counted_s = next_s - now_s if now_s >= start_s - tiny_s else 0.0
        for job in (0, 1):
            if began_s[job] <= now_s + tiny_s and now_s + tiny_s < began_s[job] + cycles[job].compute_s:
                done_s[job][1] += counted_s
        if sender is not None:
            left_s[sender] -= next_s - now_s
            done_s[sender][0] += counted_s
        now_s = next_s
        for job in (0, 1):
            if left_s[job] <= tiny_s and began_s[job] + cycles[job].compute_s <= now_s + tiny_s:
                began_s[job], left_s[job] = now_s, cycles[job].communication_s
    return Share(*done_s[0]), Share(*done_s[1])


def hyper_period_s(one: Cycle, other: Cycle) -> float:
    """The time after which two undisturbed cycles are in phase again, their ratio rounded to small numbers.

    At most _LARGEST_RATIO periods of the shorter one, or one of the longer.
    """
    short, long = sorted((one.period_s, other.period_s))
    ratio = min(long / short, _LARGEST_RATIO)
    denominator = min(_LARGEST_DENOMINATOR, int(_LARGEST_RATIO / ratio))
    return Fraction(ratio).limit_denominator(denominator).denominator * long


def comparable(one: Cycle, other: Cycle) -> Cycle:
    """`one` with its times shortened in proportion, if its period is more than _LARGEST_RATIO of the other's.

    Beyond, the other is to it a steady stream, of which only the share of the link counts: k does not depend on how
    long the cycle is, and the simulation of a pair has a bounded number of iterations whatever the jobs are.
    """
    most_s = _LARGEST_RATIO * other.period_s
    if one.period_s <= most_s:
        return one
    compute_s, communication_s = (part / one.period_s * most_s for part in (one.compute_s, one.communication_s))
    return Cycle(compute_s, communication_s, one.overlap_start)


@lru_cache(maxsize=65536)
def correction_factor(reference: Cycle, job: Cycle) -> float:
    """k_j = d_j / d_r: where the reference's intensity equals k_j times the job's, either order serves as well.

    d_r, d_j are the seconds that each transmits more when it goes first (Crux, SIGCOMM 2024, section 4.2). They depend
    on phase and window, which the paper leaves open: here the window is WINDOW_HYPER_PERIODS hyper-periods after one
    hyper-period of start-up, and they are averages over PHASES starts of the job, spread over its period. 1 where one
    gains less than one iteration's traffic: the pair then runs side by side, and what is left is the window's edge.
    Cycles of very different length are made `comparable` first.
    """
    reference, job = comparable(reference, job), comparable(job, reference)
    period_s = hyper_period_s(reference, job)
    start_s, end_s = period_s, (1 + WINDOW_HYPER_PERIODS) * period_s
    reference_gain_s = job_gain_s = 0.0
    for phase in range(PHASES):
        delay_s = job.period_s * phase / PHASES
        reference_first = share_link(reference, job, start_s, end_s, 0.0, delay_s)
        job_first = share_link(job, reference, start_s, end_s, delay_s, 0.0)
        reference_gain_s += (reference_first[0].transmit_s - job_first[1].transmit_s) / PHASES
        job_gain_s += (job_first[0].transmit_s - reference_first[1].transmit_s) / PHASES
    edge = 1 - 1e-9
    if reference_gain_s <= edge * reference.communication_s or job_gain_s <= edge * job.communication_s:
        return 1.0
    return job_gain_s / reference_gain_s


def priorities(cluster: Cluster, jobs: Sequence[Job], routes: Routes) -> dict[str, float]:
    """P_j = k_j I_j by job, in flop per second: higher goes first. Infinite for jobs that send nothing between nodes.

    The reference (k = 1) is the job with the most traffic per second when alone, over all links between nodes.
    """
    check_names(jobs)
    cycles, traffic = {}, {}
    for job in jobs:
        paths = routes[job.name]
        if any(paths):
            cycles[job.name] = Cycle(job.compute_s, transmit_s(cluster, job, paths), job.overlap_start)
            sent_bytes = sum(flow.size_bytes * len(path) for flow, path in zip(job.flows, paths, strict=True))
            traffic[job.name] = sent_bytes / cycles[job.name].period_s
    result = {job.name: math.inf for job in jobs}
    if not cycles:
        return result
    reference = min(cycles, key=lambda name: (-traffic[name], name))
    for job in jobs:
        if job.name in cycles:
            factor = 1.0 if job.name == reference else correction_factor(cycles[reference], cycles[job.name])
            result[job.name] = factor * intensity_flop_per_s(cluster, job, routes[job.name])
    return result


def order_of(priority: dict[str, float]) -> tuple[str, ...]:
    """Names from the highest priority down; equal ones by name."""
    return tuple(sorted(priority, key=lambda name: (-priority[name], name)))
