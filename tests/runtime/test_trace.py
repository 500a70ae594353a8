"""What is recorded of a run, and the arithmetic of its summary."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton import knobs

import triton_ext as tx
import triton_ext.language as txl
from collectives import inputs, launch
from triton_ext import timeline
from triton_ext.backends.cpu import pool
from triton_ext.errors import TraceError
from triton_ext.runtime import trace
from triton_ext.timeline import Launch, Message, Program, Wait


@triton.jit
def spin(flag):
    """Polls a word that no plan knows."""
    nothing = tl.full([], 0, tl.int32)
    while tl.atomic_add(flag, nothing, sem="acquire", scope="sys") == 0:
        pass


@triton.jit
def store_late(flag, c, BM: tl.constexpr, BN: tl.constexpr):
    """Stores ones; the first program, whose tile is for another rank, waits for `flag` before."""
    out = txl.epilogue(c, block_shape=[BM, BN])
    row, column = out.program_tile()
    if tl.program_id(0) == 0:
        spin(flag)
    out.store([row * BM, column * BN], tl.full([BM, BN], 1.0, tl.float32))


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Record what a function does, and load it."""

    def record(function, hosts, **options):
        monkeypatch.setattr(trace, "_trace", trace.Trace(tmp_path, 0, 1, **options))
        trace.current().start()
        try:
            tx.testing.World(len(hosts), hosts=hosts).run(function)
        finally:
            trace.stop()
        return timeline.load(tmp_path)[0]

    return record


def _runs(rank):
    plan = tx.all_to_all((64, 48), torch.float32)
    for seed in range(3):
        launch(plan, inputs(2, (64, 48), torch.float32, seed)[rank])


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_every_program_is_there(recorded, hosts):
    rank = recorded(_runs, hosts)
    assert len(rank.launches) == 6 and rank.dropped == 0
    for each in rank.launches:
        assert each.name == "copy_out" and sorted(program.index for program in each.programs) == list(range(12))
        for program in each.programs:
            edges = [at for wait in program.waits for at in (wait.begin_ns, wait.end_ns)]
            times = [each.begin_ns, program.begin_ns, *edges, program.end_ns, each.end_ns]
            assert times == sorted(times)
    messages = {message for each in rank.launches for message in each.messages}  # launches of two ranks overlap
    if hosts == [0, 0]:
        assert not messages
    else:
        for kind in ("send", "arrive"):
            assert sum(each.nbytes for each in messages if each.kind == kind) == 6 * 32 * 48 * 4


@pytest.mark.parametrize(
    ("collective", "late", "causes"),
    [
        ("all_to_all", "begins", {"ready"}),
        ("all_reduce", "begins", {"partial values", "reduced values"}),
        ("reduce_scatter", "begins", {"ready", "partial values"}),
        ("all_to_all", "computes", {"arrival"}),
    ],
)
def test_a_late_rank_shows_as_a_wait_for_it(recorded, collective, late, causes):
    def run(rank):
        options = {"shots": 2} if collective == "all_reduce" else {}
        plan = getattr(tx, collective)((48, 16), torch.float32, **options)
        flag = torch.ones(1, dtype=torch.int32)
        store_late[plan.grid(16, 16)](flag, plan, BM=16, BN=16)
        meet.wait(60)
        timer = threading.Timer(0.06, flag.fill_, (1,))
        if rank == 1 and late == "begins":
            time.sleep(0.06)
        elif rank == 1:
            flag.zero_()
            timer.start()
        store_late[plan.grid(16, 16)](flag, plan, BM=16, BN=16)

    meet = threading.Barrier(3)
    launches = recorded(run, [0, 0, 0]).launches
    longest = {}
    for wait in (wait for each in launches[3:] for wait in each.waits if wait.cause != "other"):
        longest[wait.cause, wait.peer] = max(longest.get((wait.cause, wait.peer), 0), wait.end_ns - wait.begin_ns)
    (cause, peer), length = max(longest.items(), key=lambda item: item[1])
    assert cause in causes and peer == 1
    assert 40e6 < length < 5e9


def test_a_wait_for_another_word_has_no_rank(recorded):
    """A kernel's own spin loop; another thread changes what it polls."""

    def run(_rank):
        tx.all_to_all((16, 16), torch.float32)
        flag = torch.zeros(1, dtype=torch.int32)
        spin.warmup(flag, grid=(1,))
        timer = threading.Timer(0.2, flag.fill_, (1,))
        timer.start()
        spin[(1,)](flag)
        timer.join()

    [each] = recorded(run, [0]).launches
    [wait] = each.waits
    assert (wait.cause, wait.peer) == ("other", None)
    assert 20e6 < wait.end_ns - wait.begin_ns < 5e9
    assert each.computed_ns < wait.end_ns - wait.begin_ns  # nearly nothing, on a machine that does nothing else


def test_what_does_not_fit_is_counted(recorded):
    rank = recorded(_runs, [0, 0], capacity=50)
    kept = sum(1 + len(program.waits) for each in rank.launches for program in each.programs)
    assert kept <= 50 and rank.dropped >= 72 - 50


def test_nothing_is_recorded_unless_asked(tmp_path):
    assert trace.current() is None
    tx.testing.World(2).run(_runs)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A process that has recorded nothing, and is asked to."""
    monkeypatch.setenv("TRITON_EXT_TRACE", str(tmp_path))
    monkeypatch.setattr(trace, "_started", 0)
    yield tmp_path
    trace.stop()


def test_virtual_ranks_start_one_recording(asked, monkeypatch):
    made, init = [], trace.Trace.__init__

    def slow(self, *arguments):
        made.append(self)
        time.sleep(0.05)
        init(self, *arguments)

    monkeypatch.setattr(trace.Trace, "__init__", slow)
    tx.testing.World(3).run(lambda rank: trace.start_if_asked(rank, 3))
    assert made == [trace.current()]
    trace.stop()
    assert not [call for call in knobs.runtime.launch_enter_hook.calls if getattr(call, "__self__", None) in made]


def test_a_recording_that_starts_during_a_launch(asked, monkeypatch):
    run_grid = pool.run_grid

    def starts(*arguments):
        trace.start_if_asked(0, 1)
        run_grid(*arguments)

    monkeypatch.setattr(pool, "run_grid", starts)

    def run(rank):
        monkeypatch.delenv("TRITON_EXT_TRACE")
        plan = tx.all_to_all((64, 48), torch.float32)
        monkeypatch.setenv("TRITON_EXT_TRACE", str(asked))
        for seed in range(2):
            launch(plan, inputs(1, (64, 48), torch.float32, seed)[0])

    tx.testing.World(1).run(run)
    trace.stop()
    [rank] = timeline.load(asked)
    [each] = rank.launches
    assert len(each.programs) == 12


def test_what_follows_a_recording_is_another_one(asked):
    for runs in (1, 2, 3):
        tx.testing.World(1).run(_some_runs, runs)
        trace.stop()
    for runs, directory in ((1, asked), (2, asked / "2"), (3, asked / "3")):
        [rank] = timeline.load(directory)
        assert len(rank.launches) == runs


def _some_runs(rank, runs):
    plan = tx.all_to_all((64, 48), torch.float32)
    for seed in range(runs):
        launch(plan, inputs(1, (64, 48), torch.float32, seed)[0])


def test_a_process_writes_its_file_when_it_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, triton_ext as tx\n"
        "tx.init()\n"
        "plan = tx.all_to_all((64, 64), torch.float32)\n"
        "tx.ops.gemm_all_to_all(torch.ones(64, 64), torch.ones(64, 64), plan=plan)\n"
    )
    environment = os.environ | {"TRITON_EXT_TRACE": str(tmp_path / "trace")}
    subprocess.run([sys.executable, script], env=environment, check=True, timeout=120)
    [rank] = timeline.load(tmp_path / "trace")
    assert [each.name for each in rank.launches] == ["gemm_all_to_all_kernel"]
    events = json.loads(timeline.chrome([rank]))["traceEvents"]
    assert sum(event["name"].startswith("program ") for event in events) == len(rank.launches[0].programs)
    timeline.draw([rank], -1, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 5000


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(TraceError, match="has no rank-"):
        timeline.load(tmp_path)
    (tmp_path / "rank-0.json").write_text('{"rank": 0, ')
    with pytest.raises(TraceError, match="not a whole recording"):
        timeline.load(tmp_path)
    (tmp_path / "rank-0.json").write_text('{"rank": 0, "world": 1}')
    with pytest.raises(TraceError, match="in another form"):
        timeline.load(tmp_path)
    for rank, world in ((0, 1), (1, 2)):
        _write(tmp_path, rank, world, 100 + rank, {})
    with pytest.raises(TraceError, match=r"jobs with \[1, 2\] ranks"):
        timeline.load(tmp_path)


def test_files_of_different_runs(tmp_path):
    _write(tmp_path, 0, 2, 100, {0: 100, 1: 101})
    _write(tmp_path, 1, 2, 101, {0: 100, 1: 101})
    assert [rank.rank for rank in timeline.load(tmp_path)] == [0, 1]
    _write(tmp_path, 0, 2, 200, {0: 200, 1: 201})
    with pytest.raises(TraceError, match="rank 0 was process 200, and for rank 1 it was 100"):
        timeline.load(tmp_path)


def test_a_file_that_is_missing_is_said(tmp_path):
    _write(tmp_path, 1, 3, 101, {})
    assert timeline.table(timeline.load(tmp_path)).caption.startswith("no recording of rank 0, 2")


def _write(directory, rank, world, pid, pids):
    content = {"rank": rank, "world": world, "pid": pid, "pids": pids, "wall_offset_ns": 0, "dropped": 0}
    content |= {"launches": [], "programs": [], "waits": [], "messages": []}
    (directory / f"rank-{rank}.json").write_text(json.dumps(content))


def test_hidden_communication():
    waits = (Wait(120, 150, "ready", 1), Wait(160, 190, "arrival", 2))
    programs = [Program(0, 1, 0, 100), Program(1, 1, 100, 200, waits)]
    messages = [Message("send", 1, 1, 0, 1, 10, 50, 90), Message("arrive", 1, 1, 0, 1, 10, 80, 180)]
    each = Launch("k", 0, 200, programs, messages)
    assert programs[1].computes == [(100, 120), (150, 160), (190, 200)]
    assert (each.computed_ns, each.communication_ns, each.hidden_ns) == (140, 130, 80)
    assert (each.waited_ns("ready"), each.waited_ns("arrival"), each.waited_ns("other")) == (30, 30, 0)


INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


@given(INTERVALS, INTERVALS)
def test_unions_and_overlaps(these, those):
    def points(intervals):
        return {at for begin, end in intervals for at in range(begin, end)}

    first, second = timeline.union(these), timeline.union(those)
    assert timeline.length(first) == len(points(these))
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(first))
    assert timeline.overlap(first, second) == len(points(these) & points(those))
