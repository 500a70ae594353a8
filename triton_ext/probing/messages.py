"""Times of torch.distributed's messages: one way alone, both ways at once, and all ranks to all at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from ..errors import ProbeError
from ..planner.measurements import Point
from .devices import synchronize

SIZES = (8, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_LONGEST_S = 0.2  # of one message: larger sizes are left out
_PER_SIZE_S = 0.1
_REPETITIONS = (5, 100)
_LOADED_S = 0.1  # how long a message takes alone that is sent while all ranks send
_LOADED_REPETITIONS = 5
_LOADED_BYTES = 128 << 20  # to all ranks together, at most


class Messenger:
    """Sends between this rank and the others of the default group. `control` is the same ranks over gloo."""

    def __init__(self, device: torch.device, control: dist.ProcessGroup) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.peers = [peer for peer in range(self.world) if peer != self.rank]
        self._device, self._control = device, control
        self._outgoing = torch.full((SIZES[-1],), self.rank + 1, dtype=torch.uint8, device=device)
        self._incoming: dict[int, torch.Tensor] = {}

    def one_way(self, source: int, destination: int) -> list[Point]:
        """Points of one direction with nothing else on the way, at the source; called by both.

        The source times the message and an answer as small as the smallest one: half of a small round trip is taken
        off.
        """
        if self.rank == destination:
            self._follow(source, lambda nbytes: self._answer(source, nbytes))
            return []
        return one_way(self._lead(destination, lambda nbytes: self._ask(destination, nbytes)))

    def both_ways(self, peer: int) -> list[Point]:
        """Points from the peer to this rank while as much goes the other way; called by both."""

        def exchange(nbytes: int) -> float:
            return self._exchange({peer: nbytes}, {peer: nbytes})[peer]

        return (self._lead if self.rank < peer else self._follow)(peer, exchange)

    def all_pairs(self, bandwidths_bytes_per_s: Mapping[tuple[int, int], float]) -> dict[int, list[Point]]:
        """Points from every other rank to this one while all send to all; called by all.

        Each pair's message is as large as its bandwidth alone carries in a fixed time: so all are on the way at once.
        """
        most = min(SIZES[-1], _LOADED_BYTES // max(len(self.peers), 1))
        full = {pair: min(width * _LOADED_S, most) for pair, width in bandwidths_bytes_per_s.items()}
        points: dict[int, list[Point]] = {peer: [] for peer in self.peers}
        for share in (0.0, 0.25, 0.5, 1.0):
            size = {pair: max(round(nbytes * share), SIZES[0]) for pair, nbytes in full.items()}
            outgoing = {peer: size[self.rank, peer] for peer in self.peers}
            incoming = {peer: size[peer, self.rank] for peer in self.peers}
            repetitions = _LOADED_REPETITIONS if share else _REPETITIONS[1]
            taken = []
            for _ in range(1 + repetitions):
                if share:  # small messages wait for each other anyway
                    dist.barrier(self._control)
                taken.append(self._exchange(outgoing, incoming))
            for peer in self.peers:
                points[peer].append(point(incoming[peer], [times[peer] for times in taken]))
        return points

    def _lead(self, peer: int, run: Callable[[int], float]) -> list[Point]:
        """Points of growing sizes, chosen by what the last one took; the peer is told each time.

        The smallest size is measured again with every other one, and the largest ones at the end: a machine that is
        busy for a moment must not decide the latency or the bandwidth.
        """
        points: list[Point] = []

        def measure(nbytes: int, repetitions: int) -> float:
            self._tell(peer, nbytes, repetitions)
            points.append(_measure(run, nbytes, repetitions))
            return points[-1].seconds

        least, most = _REPETITIONS
        smallest_s = last_s = measure(SIZES[0], most)
        for nbytes in SIZES[1:]:
            smallest_s = min(smallest_s, measure(SIZES[0], most // 4))
            last_s = measure(nbytes, round(min(max(_PER_SIZE_S / last_s, least), most)))
            if (last_s - smallest_s) * 4 > _LONGEST_S:
                break
        for nbytes in sorted({point.bytes for point in points})[-3:]:
            measure(nbytes, least)
        self._tell(peer, 0, 0)
        return quietest(points)

    def _follow(self, peer: int, run: Callable[[int], float]) -> list[Point]:
        points: list[Point] = []
        while True:
            numbers = torch.zeros(2, dtype=torch.int64)
            dist.recv(numbers, peer, self._control)
            nbytes, repetitions = numbers.tolist()
            if not nbytes:
                return quietest(points)
            points.append(_measure(run, nbytes, repetitions))
            self._check(peer, nbytes)

    def _tell(self, peer: int, nbytes: int, repetitions: int) -> None:
        dist.send(torch.tensor([nbytes, repetitions]), peer, self._control)

    def _ask(self, peer: int, nbytes: int) -> float:
        start = time.perf_counter()
        dist.send(self._outgoing[:nbytes], peer)
        dist.recv(self._buffer(peer, SIZES[0]), peer)
        synchronize(self._device)
        return time.perf_counter() - start

    def _answer(self, peer: int, nbytes: int) -> float:
        start = time.perf_counter()
        dist.recv(self._buffer(peer, nbytes), peer)
        dist.send(self._outgoing[: SIZES[0]], peer)
        synchronize(self._device)
        return time.perf_counter() - start

    def _exchange(self, outgoing: Mapping[int, int], incoming: Mapping[int, int]) -> dict[int, float]:
        """Send and receive so many bytes, and say after how many seconds each message was here."""
        receive = {peer: self._buffer(peer, nbytes) for peer, nbytes in incoming.items()}
        operations = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in receive.items()]
        operations += [dist.P2POp(dist.isend, self._outgoing[:nbytes], peer) for peer, nbytes in outgoing.items()]
        start = time.perf_counter()
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(operations):  # coalesced: they are complete together
            for work in works:
                work.wait()
            synchronize(self._device)
            return dict.fromkeys(incoming, time.perf_counter() - start)

        def wait(work: dist.Work) -> float:
            work.wait()
            return time.perf_counter() - start

        if len(receive) == 1:
            times = [wait(works[0])]
        else:
            with ThreadPoolExecutor(len(receive)) as pool:
                times = list(pool.map(wait, works[: len(receive)]))
        for work in works[len(receive) :]:
            work.wait()
        return dict(zip(incoming, times, strict=True))

    def _buffer(self, peer: int, nbytes: int) -> torch.Tensor:
        if peer not in self._incoming or self._incoming[peer].numel() < nbytes:
            self._incoming[peer] = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        return self._incoming[peer][:nbytes]

    def _check(self, peer: int, nbytes: int) -> None:
        buffer = self._buffer(peer, nbytes)
        if not bool((buffer == peer + 1).all()):
            raise ProbeError(f"rank {self.rank}: of {nbytes} bytes from rank {peer}, not all are what it sent")
        buffer.zero_()


def _measure(run: Callable[[int], float], nbytes: int, repetitions: int) -> Point:
    return point(nbytes, [run(nbytes) for _ in range(1 + repetitions)])


def point(nbytes: int, times_s: Sequence[float]) -> Point:
    """Of repeated transfers, the first of which warms up and does not count."""
    return Point(nbytes, statistics.median(times_s[1:]), min(times_s[1:]), len(times_s) - 1)


def quietest(points: Sequence[Point]) -> list[Point]:
    """By size, ascending: of those measured several times, the one with the smallest median."""
    best: dict[int, Point] = {}
    for each in points:
        if each.bytes not in best or each.seconds < best[each.bytes].seconds:
            best[each.bytes] = each
    return [best[nbytes] for nbytes in sorted(best)]


def one_way(round_trips: Sequence[Point]) -> list[Point]:
    """What is left without the answers, each as small as the smallest message: half of its fastest round trip."""
    first, *others = round_trips
    answer_s = first.fastest_s / 2

    def without(round_trip_s: float) -> float:
        return max(round_trip_s - answer_s, round_trip_s / 2)

    halved = Point(first.bytes, first.seconds / 2, answer_s, first.repetitions)
    return [halved, *(Point(p.bytes, without(p.seconds), without(p.fastest_s), p.repetitions) for p in others)]
