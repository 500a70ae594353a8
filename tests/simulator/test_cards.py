"""Plans with peers behind NVSHMEM, simulated: cards read the outbox late and in parts, data lags behind its signal."""

import functools
import re

import pytest

from collectives import simulation
from triton_ext.ir import read_module
from triton_ext.simulator.simulate import residents
from triton_ext.simulator.translate import translate

COLLECTIVES = ["all_to_all", "all_reduce", "all_reduce_one_shot", "reduce_scatter", "all_gather", "broadcast", "put"]
HOSTS = [0, 0, 1]
SLICES = 4  # to a peer
RUNS = 3  # so that every outbox is written again, and again


@pytest.fixture(scope="module")
def simulations():
    """One for each collective, made once."""
    return functools.cache(lambda collective: simulation(collective, hosts=HOSTS, slices=SLICES))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_nothing_is_found(simulations, collective):
    for seed in (0, 6, 9, 12, 13):  # every policy, every delivery
        finding, _ = simulations(collective).run(seed, RUNS, residents(seed))
        assert finding is None, str(finding)


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_nothing_is_found_with_many_seeds(simulations, collective):
    for seed in range(30):
        finding, _ = simulations(collective).run(seed, RUNS, residents(seed))
        assert finding is None, str(finding)


def test_a_transfer_consists_of_several_slices(simulations):
    names = [name for place in simulations("all_to_all").places.values() for name in place.words.values()]
    assert "slice 1 of values for rank 2" in names


@pytest.mark.parametrize("hosts", [[0, 1, 2], [1, 0, 1]])
def test_other_hosts(hosts):
    simulated = simulation("all_reduce", hosts=hosts, slices=SLICES)
    for seed in (0, 6, 12):
        finding, _ = simulated.run(seed, RUNS, residents(seed))
        assert finding is None, str(finding)


def without(pattern):
    """A mutation: the first line of the IR that matches is gone."""
    return lambda text: re.sub(rf"^.*{pattern}.*\n", "", text, count=1, flags=re.MULTILINE)


def twice(text):
    """A mutation: what is one thread's is done by two."""
    line = re.search(r"^.*nvshmem_putmem_signal_nbi.*\n", text, re.MULTILINE)[0]
    return text.replace(line, line + re.sub(r"%\S+ = ", "%again = ", line, count=1), 1)


def weaker(text):
    """A mutation: a slice's counter acquires nothing of what other programs stored."""
    return re.sub(r"tt\.atomic_rmw add, acq_rel, sys", "tt.atomic_rmw add, release, sys", text)


MUTATIONS = {
    "no NVSHMEM wait behind the tail": ("all_to_all", without("nvshmem_signal_wait_until"), "race"),
    "no NVSHMEM wait before partial values are read": ("reduce_scatter", without("nvshmem_signal_wait_until"), "race"),
    "no announcement to another host": ("all_gather", without("nvshmemx_signal_op"), "deadlock"),
    "no put": ("all_to_all", without("nvshmem_putmem_signal_nbi"), "deadlock"),
    "two threads put": ("all_to_all", twice, "double write"),
    "slice counters do not acquire": ("all_gather", weaker, "race"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_piece_is_needed(simulations, name):
    collective, mutate, kind = MUTATIONS[name]
    simulated = simulations(collective)
    codes = {}
    for text in simulated.codes:
        mutant = mutate(text)
        assert mutant != text
        codes[text] = translate(read_module(mutant))
    found = (simulated.run(seed, RUNS, residents(seed), codes=codes)[0] for seed in range(40))
    finding = next((each for each in found if each is not None), None)
    assert finding is not None and finding.kind == kind, str(finding)


def test_without_the_ready_wait_a_card_still_reads_what_is_overwritten(simulations):
    """The peer's announcement of run e + 1 is what says that the puts of run e are over."""
    simulated = simulations("broadcast")
    places = {}
    for address, place in simulated.places.items():
        if place.name.startswith("signals"):
            content = place.content.copy()
            words = [unit for unit, name in place.words.items() if name.startswith("READY")]
            content.view("int64")[words] = 1 << 40  # every rank seems to have begun every run
            place = type(place)(**{**vars(place), "content": content})
        places[address] = place
    before, simulated.places = simulated.places, places
    try:
        findings = [str(simulated.run(seed, RUNS, residents(seed))[0]) for seed in range(10)]
    finally:
        simulated.places = before
    assert any("race" in finding and "network card" in finding for finding in findings)
