"""The host that looks at a run from outside: it fails one that waits for a rank that is gone, and no other."""

import threading

import pytest
import torch

import triton_ext as tx
from collectives import inputs, launch, simulation
from triton_ext.errors import PeerLost, PlanError
from triton_ext.passes import abi
from triton_ext.runtime import watch
from triton_ext.simulator.machine import Machine

COLLECTIVES = ["all_to_all", "reduce_scatter", "all_reduce"]  # each ends in its own way
SHAPE = (8, 16)


def behind_a_run(check):
    """Call check(state) with a plan of rank 0 that has one run behind it, and whose peer has left in good order."""
    tensors = inputs(2, SHAPE, torch.float32)

    def rank_main(rank):
        plan = tx.all_to_all(SHAPE, torch.float32)
        launch(plan, tensors[rank])
        state = plan._state
        if rank == 1:
            plan.free()
        state.group.exchange(None)
        if rank == 0:
            assert state._gone() == [1]
            check(state)

    tx.testing.World(2).run(rank_main)


def test_a_run_that_needs_a_rank_that_left():
    def check(state):
        state.words[abi.TICKETS] += 1
        state.look()
        assert state.word(abi.STATUS) == abi.FAILED_HOST
        with pytest.raises(PeerLost, match=r"run 1: lost rank 1 \(it has left the plan\)"):
            state.check()

    behind_a_run(check)


def test_a_run_that_ends_while_the_host_looks(monkeypatch):
    """The last program's two stores, each at the worst moment: the run is complete, and the next has not begun."""

    def check(state):
        words, gone = state.words, state._gone
        epoch, base = int(words[abi.EPOCH]), int(words[abi.BASE])
        words[abi.EPOCH], words[abi.BASE] = epoch - 1, base - 1  # as its last program found them
        state.look()
        assert not words[abi.STATUS], "all of the run had arrived"

        def ends():
            words[abi.BASE], words[abi.EPOCH] = base, epoch
            return gone()

        monkeypatch.setattr(state, "_gone", ends)
        state.look()
        assert not words[abi.STATUS], state._failure(abi.FAILED_HOST)
        words[abi.EPOCH] = epoch - 1  # BASE is stored, EPOCH is not yet
        state.look()
        assert not words[abi.STATUS]

    behind_a_run(check)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_run_ends_with_its_number(collective, monkeypatch):
    """The last program of a rank stores BASE, then EPOCH: between the two, no run is in progress."""
    stores = []
    note = Machine.note

    def keep(machine, program, verb, region, units, detail=""):
        if verb == "writes" and region.place.name.startswith("state"):
            stores.append((program.rank, region.place.words[units.item()]))
        note(machine, program, verb, region, units, detail)

    monkeypatch.setattr(Machine, "note", keep)
    runs = 3
    finding, _ = simulation(collective, 2, SHAPE).run(0, runs)
    assert finding is None
    for rank in range(2):
        assert [word for by, word in stores if by == rank] == ["BASE", "EPOCH"] * runs


@pytest.mark.parametrize("at", ["_gone", "_lacks"])
def test_a_plan_that_is_freed_while_the_host_looks(at, monkeypatch):
    def check(state):
        looks, freed, errors = threading.Event(), threading.Event(), []
        found = getattr(state, at)

        def during(*arguments):
            result = found(*arguments)
            looks.set()
            freed.wait(0.2)
            return result

        def look():
            try:
                state.look()
            except BaseException as error:
                errors.append(error)

        monkeypatch.setattr(state, at, during)
        state.words[abi.TICKETS] += 1
        thread = threading.Thread(target=look)
        thread.start()
        assert looks.wait(5)
        state.free()
        freed.set()
        thread.join(5)
        assert not thread.is_alive() and not errors
        with pytest.raises(PlanError, match="plan that was freed"):
            state.result()

    behind_a_run(check)


class Looks:
    def __init__(self, error=None):
        self.error, self.times, self.twice = error, 0, threading.Event()

    def look(self):
        self.times += 1
        if self.times == 2:
            self.twice.set()
        if self.error:
            raise self.error


def test_a_look_that_fails_ends_nothing_but_itself(monkeypatch):
    reported = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_value))
    here = watch.Watch(torch.device("cpu"))
    bad, good, later = Looks(ZeroDivisionError("a look")), Looks(), Looks()
    here.add(bad)
    here.add(good)
    assert good.twice.wait(5)
    before_ms = int(here.clock_ms)
    here.add(later)
    assert later.twice.wait(5)
    here.stop()
    assert int(here.clock_ms) > before_ms
    assert reported == [bad.error] and bad.times == 1


def test_one_watch_for_all_plans(monkeypatch):
    first = watch.watch_for(torch.device("cpu"))
    monkeypatch.delattr(watch, "Watch")
    assert watch.watch_for(torch.device("cpu")) is first
