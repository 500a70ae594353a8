"""Plans of several threads, plans that cannot be made, and plans that end."""

import threading
import time
import warnings
import weakref

import pytest
import torch

import triton_ext as tx
from collectives import inputs, launch
from triton_ext.errors import PlanError
from triton_ext.runtime import groups, plans, proxy
from triton_ext.runtime.segment import SIGNALS
from triton_ext.runtime.shipment import LEFT

SHAPE = (4, 4)


def test_a_plan_that_is_made_while_another_rank_launches(monkeypatch):
    """A launch looks at all plans of the process: rank 1 adds one meanwhile."""
    looks, added = threading.Event(), threading.Event()

    class Slow(weakref.WeakSet):
        def __iter__(self):
            for state in super().__iter__():
                yield state
                if plays_rank_0():
                    looks.set()
                    added.wait(0.2)

    def plays_rank_0():
        return (me := groups.virtual_rank()) is not None and me.rank == 0 and me.size == 2

    def rank_main(rank):
        plan = tx.all_reduce(SHAPE, torch.float32)
        alone = tx.testing.subgroup([rank])
        tensor = inputs(1, SHAPE, torch.float32)[0]
        if rank == 1:
            launch(plan, tensor)
            assert looks.wait(20)
            more = tx.all_reduce(SHAPE, torch.float32, group=alone)
            added.set()
            launch(more, tensor)
        else:
            launch(plan, tensor)

    monkeypatch.setattr(plans, "_live", Slow())
    tx.testing.World(2).run(rank_main)
    assert added.is_set()


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_a_rank_that_cannot_watch_its_peers(hosts, monkeypatch):
    class Peers(plans.Peers):
        def __init__(self, pids):
            super().__init__(pids)
            if groups.virtual_rank().rank == 1:
                raise OSError(24, "Too many open files")

    def rank_main(rank):
        with pytest.raises(PlanError, match=r"rank 1 cannot watch .*: .*Too many open files"):
            tx.all_gather(SHAPE, torch.float32)

    mine = proxy.proxy()
    before = list(mine._traffics)
    monkeypatch.setattr(plans, "Peers", Peers)
    tx.testing.World(2, hosts=hosts).run(rank_main)
    assert [each for each in mine._traffics if each not in before] == []


def never_whole(monkeypatch):
    """What other hosts do not take in time: returns what the proxy is asked for, in order."""
    asked, retire = [], proxy.Proxy.retire

    def noted(self, traffic, timeout_s):
        asked.append("retire")
        retire(self, traffic, timeout_s)

    def finish(self, traffic):
        asked.append("finish")
        return False

    monkeypatch.setattr(proxy.Proxy, "retire", noted)
    monkeypatch.setattr(proxy.Proxy, "finish", finish)
    return asked


def test_a_plan_is_freed_although_it_warns_and_warnings_are_errors(monkeypatch):
    def rank_main(rank):
        plan = tx.all_gather(SHAPE, torch.float32)
        groups.virtual_rank().exchange(None)
        if rank == 0:
            with pytest.raises(UserWarning, match="ended before peers on other hosts took what it had"):
                plan.free()
            assert plan.is_freed and not plan.is_between_hosts
        groups.virtual_rank().exchange(None)
        return plan

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with monkeypatch.context() as patch:
            never_whole(patch)
            with pytest.raises(UserWarning):  # of rank 1, whose plan World frees
                tx.testing.World(2, hosts=[0, 1]).run(rank_main)
    assert [state for state in plans._all_live() if state.traffic] == []


def test_the_plans_of_a_process_leave_together_at_its_end(monkeypatch):
    """And all else ends although each of them warns, and warnings are errors."""
    ended = []
    for module, name in ((plans.proxy, "finish"), (plans.proxy, "stop"), (plans, "stop_watches")):
        monkeypatch.setattr(module, name, lambda *_, name=name: ended.append(name))

    def rank_main(rank):
        made = [tx.all_gather(SHAPE, torch.float32) for _ in range(2)]
        groups.virtual_rank().exchange(None)
        if rank == 0:
            with warnings.catch_warnings(), monkeypatch.context() as patch:
                warnings.simplefilter("error", UserWarning)
                asked = never_whole(patch)
                with pytest.raises(UserWarning):
                    plans._leave_all()
            assert asked == ["retire"] * 4 + ["finish"] * 4
            assert ended == ["finish", "stop", "stop_watches"]
        groups.virtual_rank().exchange(None)
        return made

    tx.testing.World(2, hosts=[0, 1]).run(rank_main)


@pytest.mark.parametrize("when", ["waits", "comes later"])
def test_a_rank_that_raises_ends_those_in_a_subgroup(when):
    def rank_main(rank):
        me = groups.virtual_rank()
        if rank == 1:
            time.sleep(0.1)
            raise ZeroDivisionError
        if when == "comes later":
            while not me.meeting.barrier.broken:
                time.sleep(0.01)
        with pytest.raises(PlanError):
            tx.testing.subgroup([0, 1, 2]).subgroup([0, 1]).exchange(None) if rank == 0 else me.exchange(None)

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        tx.testing.World(3).run(rank_main)
    assert time.monotonic() - start < groups.timeout_s() / 2


@pytest.mark.parametrize("collective", ["all_to_all", "all_reduce", "reduce_scatter", "all_gather"])
def test_what_a_run_lacks_of_a_rank_that_is_gone(collective):
    """Through gateways: each word that rank 0 waits for, of rank 3, or of rank 2 which brings the sums of both."""
    tensors = inputs(4, (8, 4), torch.float32)

    def rank_main(rank):
        plan = getattr(tx, collective)((8, 4), torch.float32, schedule="hierarchical")
        launch(plan, tensors[rank])
        groups.virtual_rank().exchange(None)
        found = _lacking(plan._state) if rank == 0 else None
        groups.virtual_rank().exchange(None)
        return found

    found = tx.testing.World(4, hosts=[0, 0, 1, 1]).run(rank_main)[0]
    sums = collective in ("all_reduce", "reduce_scatter")
    own = {"all_reduce": {"REDUCED"}, "reduce_scatter": {"READY"}}.get(collective, {"READY", "ARRIVED"})
    assert found["died"] == {(3, name) for name in own} | ({(2, "ARRIVED")} if sums else set())
    assert found["left"] == {(3, name) for name in own}


def _lacking(state):
    """By how rank 3 has gone: the words without which the run lacks something of it."""
    found = {"died": set(), "left": set()}
    for how, reason in (("died", "its process has ended"), ("left", LEFT)):
        state.traffic.lost[3] = reason
        assert not state._lacks(3, 1)
        for rank in (2, 3):
            for number, name in enumerate(SIGNALS):
                word, state.signals[rank, number] = int(state.signals[rank, number]), 0
                if state._lacks(3, 1):
                    found[how].add((rank, name))
                state.signals[rank, number] = word
    del state.traffic.lost[3]
    return found
