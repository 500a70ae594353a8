"""Every mutant of what the passes insert is reported."""

import pytest

from collectives import simulation
from simulator.mutants import CASES, missed, results
from triton_ext.simulator.mutate import mutants
from triton_ext.simulator.translate import translate

STORING = ["all_to_all", "all_gather", "broadcast", "put"]


@pytest.mark.parametrize("collective", STORING)
def test_every_mutant_of_a_collective_that_stores_is_reported(collective):
    found = results(collective)
    assert len(found) > 25
    assert missed(found) == []


@pytest.mark.slow
@pytest.mark.parametrize("collective", sorted(set(CASES) - set(STORING)))
def test_every_mutant_of_a_reduction_is_reported(collective):
    found = results(collective)
    assert len(found) > 45
    assert missed(found) == []


@pytest.mark.parametrize("collective", sorted(set(CASES) - set(STORING)))
def test_the_mutants_of_a_reduction_that_take_its_waits_away_are_reported(collective):
    """The fast part of the test above: tiles of several owners, each wait, barrier and arrival of a kind once."""
    wanted = {"barrier", "arrival", "wait (partial values)", "wait (ready)", "wait (tail)", "announcement", "release"}
    simulated = simulation(collective)
    seen = set()
    [text] = simulated.modules
    for mutant in mutants(simulated.modules[text]):
        if mutant.kind in wanted - seen and reported(simulated, text, mutant):
            seen.add(mutant.kind)
    assert seen == wanted - ({"wait (ready)", "announcement"} if collective == "all_reduce" else {"wait (tail)"})


def reported(simulated, text, mutant):
    codes = {text: translate(mutant.module)}
    return any(simulated.run(seed, codes=codes)[0] for seed in range(15))


def test_the_kinds_of_mutants_of_an_all_to_all():
    """One of each piece that docs/protocol.md names."""
    [module] = simulation("all_to_all").modules.values()
    kinds = {mutant.kind for mutant in mutants(module)}
    assert kinds >= {"barrier", "release", "acquire", "system scope", "announcement", "arrival", "wait (ready)",
                     "wait (tail)", "owner of a row", "first owner of a tile", "last owner of a tile",
                     "choice of a receiver", "count of an arrival"}  # fmt: skip
