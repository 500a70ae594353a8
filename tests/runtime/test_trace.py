"""What is recorded of a run, and the arithmetic of its summary."""

import itertools
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import triton_ext as tx
from collectives import inputs, launch
from triton_ext import timeline
from triton_ext.errors import TraceError
from triton_ext.runtime import trace
from triton_ext.timeline import Launch, Message, Program


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
    assert len(rank.launches) == 6 and rank.dropped_programs == 0
    for each in rank.launches:
        assert each.name == "copy_out" and sorted(program.index for program in each.programs) == list(range(12))
        for program in each.programs:
            assert each.begin_ns <= program.begin_ns <= program.end_ns - program.waited_ns
            assert program.end_ns <= each.end_ns
    messages = {message for each in rank.launches for message in each.messages}  # launches of two ranks overlap
    if hosts == [0, 0]:
        assert not messages
    else:
        for kind in ("send", "arrive"):
            assert sum(each.nbytes for each in messages if each.kind == kind) == 6 * 32 * 48 * 4


def test_a_late_rank_shows_as_a_wait(recorded):
    def run(rank):
        plan = tx.all_reduce((16, 16), torch.float32)
        launch(plan, torch.ones(16, 16))
        if rank == 1:
            time.sleep(0.05)
        launch(plan, torch.ones(16, 16))

    longest = max(each.waited_at_end_ns + each.waited_within_ns for each in recorded(run, [0, 0]).launches[2:])
    assert 30e6 < longest < 5e9


def test_what_does_not_fit_is_counted(recorded):
    assert recorded(_runs, [0, 0], capacity=50).dropped_programs == 72 - 50


def test_nothing_is_recorded_unless_asked(tmp_path):
    assert trace.current() is None
    tx.testing.World(2).run(_runs)
    assert list(tmp_path.iterdir()) == []


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
    for rank, world in ((0, 1), (1, 2)):
        content = {"rank": rank, "world": world, "launches": [], "programs": [], "messages": []}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(content | {"wall_offset_ns": 0, "dropped_programs": 0}))
    with pytest.raises(TraceError, match=r"jobs with \[1, 2\] ranks"):
        timeline.load(tmp_path)


def test_hidden_communication():
    programs = [Program(0, 1, 0, 100, 0), Program(1, 1, 100, 200, 60)]
    messages = [Message("send", 1, 1, 0, 1, 10, 50, 90), Message("arrive", 1, 1, 0, 1, 10, 80, 180)]
    each = Launch("k", 0, 200, programs, messages)
    assert (each.computed_ns, each.communication_ns, each.hidden_ns) == (140, 130, 90)
    assert (each.waited_at_end_ns, each.waited_within_ns) == (60, 0)


INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


@given(INTERVALS, INTERVALS)
def test_unions_and_overlaps(these, those):
    def points(intervals):
        return {at for begin, end in intervals for at in range(begin, end)}

    first, second = timeline.union(these), timeline.union(those)
    assert timeline.length(first) == len(points(these))
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(first))
    assert timeline.overlap(first, second) == len(points(these) & points(those))
