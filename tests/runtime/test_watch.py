"""The host that looks at a run from outside: it fails one that waits for a rank that is gone, and no other."""

import pytest
import torch

import triton_ext as tx
from collectives import inputs, launch, simulation
from triton_ext.errors import PeerLost
from triton_ext.passes import abi
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
