"""Reads what runtime/trace.py recorded: a summary, a trace for Perfetto, and a picture. Knows nothing of Triton."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from .errors import TraceError

Interval = tuple[int, int]


@dataclass(frozen=True)
class Wait:
    """While a program polled a word in memory. cause: what for; peer: the rank that was to change it, if known."""

    begin_ns: int
    end_ns: int
    cause: str
    peer: int | None


@dataclass(frozen=True)
class Program:
    """A program's run. All times of a timeline are ns since the first launch of any rank."""

    index: int
    thread: int
    begin_ns: int
    end_ns: int
    waits: tuple[Wait, ...] = ()

    @property
    def waited_ns(self) -> int:
        return sum(wait.end_ns - wait.begin_ns for wait in self.waits)

    @property
    def computes(self) -> list[Interval]:
        """What is between the waits."""
        edges = [self.begin_ns, *(at for wait in self.waits for at in (wait.begin_ns, wait.end_ns)), self.end_ns]
        return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


@dataclass(frozen=True)
class Message:
    """Slices that were sent, from when they were complete until the socket had them, or that arrived."""

    kind: str
    peer: int
    run: int
    first: int
    slices: int
    nbytes: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class Launch:
    """A kernel's run, its programs, and the messages that began during it."""

    name: str
    begin_ns: int
    end_ns: int
    programs: list[Program]
    messages: list[Message]

    @property
    def waits(self) -> list[Wait]:
        return [wait for program in self.programs for wait in program.waits]

    def waited_ns(self, cause: str) -> int:
        """Of all threads together."""
        return sum(wait.end_ns - wait.begin_ns for wait in self.waits if wait.cause == cause)

    @property
    def computed_ns(self) -> int:
        """Of all threads together."""
        return sum(each.end_ns - each.begin_ns - each.waited_ns for each in self.programs)

    @property
    def communication_ns(self) -> int:
        """Time during which a message was on its way, in or out."""
        return length(union((each.begin_ns, each.end_ns) for each in self.messages))

    @property
    def hidden_ns(self) -> int:
        """The part of communication_ns during which a program computed."""
        busy = union(interval for each in self.programs for interval in each.computes)
        return overlap(busy, union((each.begin_ns, each.end_ns) for each in self.messages))


@dataclass(frozen=True)
class Rank:
    """What one process recorded."""

    rank: int
    world: int
    dropped: int
    launches: list[Launch]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint, in order."""
    joined: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


def overlap(these: list[Interval], those: list[Interval]) -> int:
    """Length of what two unions have in common."""
    return length(these) + length(those) - length(union([*these, *those]))


def load(directory: Path) -> list[Rank]:
    """All ranks of a recorded job, in order. Raises TraceError for files that are missing, broken or of two jobs."""
    paths = sorted(directory.glob("rank-*.json"))
    if not paths:
        raise TraceError(f"{directory} has no rank-*.json: run the job with TRITON_EXT_TRACE={directory}, to its end")
    files: list[dict[str, Any]] = []
    for path in paths:
        try:
            files.append(json.loads(path.read_text()))
        except ValueError as error:
            raise TraceError(f"{path} is not a whole recording ({error}): record again") from None
    try:
        return _together(directory, files)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"{directory} has recordings in another form ({error!r}): record again") from None


def _together(directory: Path, files: list[dict[str, Any]]) -> list[Rank]:
    worlds = {file["world"] for file in files}
    if len(worlds) > 1 or len(files) > max(worlds):
        raise TraceError(
            f"{directory} has recordings of jobs with {sorted(worlds)} ranks: record each into its own place"
        )
    for file in files:
        for other in files:
            pid = other["pids"].get(str(file["rank"]), file["pid"])
            if pid != file["pid"]:
                raise TraceError(
                    f"{directory} has recordings of different runs: rank {file['rank']} was process {file['pid']}, and "
                    f"for rank {other['rank']} it was {pid}; empty the directory, and record again"
                )
    starts = [each["begin_ns"] + file["wall_offset_ns"] for file in files for each in file["launches"]]
    return sorted((_rank(file, min(starts, default=0)) for file in files), key=lambda rank: rank.rank)


def _rank(file: dict[str, Any], start_ns: int) -> Rank:
    shift = file["wall_offset_ns"] - start_ns
    waits: dict[tuple[int, int], list[Wait]] = defaultdict(list)
    for launch, index, _, begin, end, cause, peer in file["waits"]:
        waits[launch, index].append(Wait(begin + shift, end + shift, cause, peer))
    programs: list[list[Program]] = [[] for _ in file["launches"]]
    for launch, index, thread, begin, end in file["programs"]:
        in_order = tuple(sorted(waits[launch, index], key=lambda wait: wait.begin_ns))
        programs[launch].append(Program(index, thread, begin + shift, end + shift, in_order))
    messages = [
        Message(
            each["kind"], each["peer"], each["run"], each["first"], each["slices"], each["bytes"],
            each["begin_ns"] + shift, each["end_ns"] + shift,
        )
        for each in file["messages"]
    ]  # fmt: skip
    launches = []
    for each, inside in zip(file["launches"], programs, strict=True):
        begin, end = each["begin_ns"] + shift, each["end_ns"] + shift
        during = [message for message in messages if begin <= message.begin_ns < end]
        launches.append(Launch(each["name"], begin, end, inside, during))
    return Rank(file["rank"], file["world"], file["dropped"], launches)


def table(ranks: list[Rank]) -> Table:
    """A row for each kernel of each rank: medians over its launches, but the first, which compiles and connects."""
    result = Table(title="medians of all launches but each kernel's first, in ms")
    heads = ("length", "compute", "commu-\nnication", "hidden", "MB/s", "idle", "waits", "longest\nof all")
    for name in ("", "runs", *heads):
        result.add_column(name, justify="right" if name else "left")
    for rank in ranks:
        for name in dict.fromkeys(launch.name for launch in rank.launches):
            launches = [launch for launch in rank.launches if launch.name == name]
            result.add_row(f"rank {rank.rank}\n{name}", str(len(launches)), *_cells(launches[1:] or launches))
        if rank.dropped:
            result.add_row(f"rank {rank.rank}: {rank.dropped} programs and waits did not fit into the recording")
    here = {rank.rank for rank in ranks}
    if missing := sorted(set(range(max((rank.world for rank in ranks), default=0))) - here):
        result.caption = f"no recording of rank {', '.join(map(str, missing))}: a process that is killed writes none"
    return result


def _cells(launches: list[Launch]) -> list[str]:
    def ms(values: Iterable[int]) -> str:
        return f"{statistics.median(values) / 1e6:.2f}"

    def idle(launch: Launch) -> int:
        threads = len({program.thread for program in launch.programs}) or 1
        return threads * (launch.end_ns - launch.begin_ns) - sum(p.end_ns - p.begin_ns for p in launch.programs)

    communication = sum(launch.communication_ns for launch in launches)
    sent = sum(each.nbytes for launch in launches for each in launch.messages if each.kind == "send")
    causes = sorted({wait.cause for launch in launches for wait in launch.waits})
    longest = max((w for launch in launches for w in launch.waits), key=lambda w: w.end_ns - w.begin_ns, default=None)
    text = ""
    if longest is not None:
        text = f"{(longest.end_ns - longest.begin_ns) / 1e6:.2f}\n{longest.cause}"
        text += f"\nof rank {longest.peer}" if longest.peer is not None else ""
    return [
        ms(launch.end_ns - launch.begin_ns for launch in launches),
        ms(launch.computed_ns for launch in launches),
        ms(launch.communication_ns for launch in launches),
        f"{sum(launch.hidden_ns for launch in launches) / communication:.0%}" if communication else "",
        f"{sent / communication * 1e3:.0f}" if communication else "",
        ms(idle(launch) for launch in launches),
        "\n".join(f"{cause} {ms(launch.waited_ns(cause) for launch in launches)}" for cause in causes),
        text,
    ]


def chrome(ranks: list[Rank]) -> str:
    """JSON for Perfetto and chrome://tracing: a process for each rank; threads, and links to peers, as its threads."""
    events: list[dict[str, Any]] = []

    def event(rank: int, lane: str, name: str, begin_ns: int, end_ns: int, **about: Any) -> None:
        events.append(
            {"ph": "X", "pid": rank, "tid": lane, "name": name, "ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3,
             "args": about}
        )  # fmt: skip

    for rank in ranks:
        events.append({"ph": "M", "pid": rank.rank, "name": "process_name", "args": {"name": f"rank {rank.rank}"}})
        for number, launch in enumerate(rank.launches):
            event(rank.rank, "launches", launch.name, launch.begin_ns, launch.end_ns, launch=number)
            for each in launch.programs:
                lane = f"thread {each.thread}"
                event(rank.rank, lane, f"program {each.index}", each.begin_ns, each.end_ns)
                for wait in each.waits:
                    event(rank.rank, lane, f"waits: {wait.cause}", wait.begin_ns, wait.end_ns, peer=wait.peer)
            for message in launch.messages:
                lane = f"{'to' if message.kind == 'send' else 'from'} rank {message.peer}"
                name = f"slices {message.first} to {message.first + message.slices - 1}"
                event(rank.rank, lane, name, message.begin_ns, message.end_ns, bytes=message.nbytes, run=message.run)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


_PROGRAMS = ("#35a67c", "#1b7f5c")  # in turn, so that neighbours can be told apart


def draw(ranks: list[Rank], number: int, path: Path) -> None:
    """One launch on all ranks: a lane for each thread, and one for each direction of each link. Needs matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.patches import Patch
    except ImportError:
        raise TraceError("drawing needs matplotlib: pip install 'triton-ext[bench]'") from None
    try:
        launches = [rank.launches[number] for rank in ranks]
    except IndexError:
        fewest = min(len(rank.launches) for rank in ranks)
        raise TraceError(f"launch {number}: there are only {fewest} on a rank") from None
    lanes: list[str] = []
    bars: list[tuple[int, int, int, str, str]] = []  # lane, begin, end, colour, hatch
    for rank, launch in zip(ranks, launches, strict=True):
        for count, thread in enumerate(sorted({each.thread for each in launch.programs})):
            lanes.append(f"rank {rank.rank}, " + ("programs" if count == 0 else f"programs, thread {count}"))
            for each in launch.programs:
                if each.thread == thread:
                    colour = _PROGRAMS[each.index % 2]
                    bars += [(len(lanes) - 1, *interval, colour, "") for interval in each.computes]
                    bars += [(len(lanes) - 1, wait.begin_ns, wait.end_ns, "#f3f3f3", "////") for wait in each.waits]
        for kind, word, colour in (("send", "to", "#c9803a"), ("arrive", "from", "#7a6bb0")):
            for peer in sorted({each.peer for each in launch.messages if each.kind == kind}):
                lanes.append(f"{word} rank {peer}")
                for message in launch.messages:
                    if (message.kind, message.peer) == (kind, peer):
                        bars.append((len(lanes) - 1, message.begin_ns, message.end_ns, colour, ""))
    lane_inches = 0.42 if len(lanes) <= 12 else 0.17
    figure, axis = pyplot.subplots(figsize=(10, lane_inches * len(lanes) + 1.6), layout="constrained")
    start = min(launch.begin_ns for launch in launches)
    for lane, begin, end, colour, hatch in bars:
        if end > begin:
            axis.barh(
                lane, (end - begin) / 1e6, left=(begin - start) / 1e6, height=0.8, color=colour, hatch=hatch,
                edgecolor="#909090" if hatch else "white" if colour in _PROGRAMS else colour, linewidth=0.4,
            )  # fmt: skip
    for lane in (lane for lane, label in enumerate(lanes) if lane and label.endswith("programs")):
        axis.axhline(lane - 0.5, color="#909090", linewidth=0.6)
    axis.set_yticks(range(len(lanes)), lanes, fontsize=8 if len(lanes) <= 12 else 6)
    axis.margins(y=0)
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    axis.set_title(f"{launches[0].name}, {len(launches[0].programs)} programs a rank", fontsize=10)
    keys = [
        (_PROGRAMS[0], "", "computes"),
        ("#f3f3f3", "////", "waits"),
        ("#c9803a", "", "sends"),
        ("#7a6bb0", "", "arrives"),
    ]
    patches = [Patch(facecolor=c, hatch=h, edgecolor="#909090" if h else c, label=text) for c, h, text in keys]
    figure.legend(handles=patches, loc="outside upper right", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
