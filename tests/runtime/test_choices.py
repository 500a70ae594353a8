"""What a plan runs where its caller leaves that open: the planner's choice, the same on every rank, and explained."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import cluster_files
import triton_ext as tx
from collectives import assert_close, inputs, launch, reference
from triton_ext.errors import PlanError
from triton_ext.planner import presets
from triton_ext.planner.cluster import Cluster, DeviceType, Fabric, Node
from triton_ext.runtime import layout, transfers
from triton_ext.runtime.choices import Question, Wishes
from triton_ext.runtime.layout import Layout
from triton_ext.runtime.transfers import Transfer

SMALL, LARGE = (8, 16), (512, 1024)


def in_world(world, function, hosts=None):
    return tx.testing.World(world, hosts=hosts).run(function)


def shots_of(plan):
    return 1 if plan._state.collective == "all_reduce_one_shot" else 2


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("hosts", [None, [0, 0, 1], [0, 1, 2]])
def test_open_choices_give_the_right_sum(shape, hosts):
    tensors = inputs(3, shape, torch.float32)

    def rank_main(rank):
        plan = tx.all_reduce(shape, torch.float32)
        assert_close(launch(plan, tensors[rank], (64, 64)), reference("all_reduce", tensors, rank))
        decision = plan.explain()
        assert decision.choice.schedule == ("one_shot" if shots_of(plan) == 1 else "two_shot")
        return decision.choice

    assert len(set(in_world(3, rank_main, hosts))) == 1


def test_small_sums_take_one_shot_large_ones_two():
    def rank_main(rank):
        return [shots_of(tx.all_reduce(shape, torch.float32)) for shape in (SMALL, LARGE)]

    assert in_world(4, rank_main) == [[1, 2]] * 4


def test_what_the_caller_says_is_done():
    def rank_main(rank):
        for shape in (SMALL, LARGE):
            for shots in (1, 2):
                plan = tx.all_reduce(shape, torch.float32, shots=shots)
                assert shots_of(plan) == shots
                decision = plan.explain()
                assert decision.choice.schedule == ("one_shot", "two_shot")[shots - 1]
                assert f"the caller asked for shots={shots}" in str(decision)

    in_world(2, rank_main)


@pytest.mark.parametrize("slices", [1, 3, 64])
def test_slices_that_the_caller_says(slices):
    tensors = inputs(2, (96, 40), torch.float32)

    def rank_main(rank):
        plan = tx.all_to_all((96, 40), torch.float32, slices=slices)
        assert {t.slices for t in plan._state.outbox.transfers.values() if t.elements} == {min(slices, 48)}
        assert_close(launch(plan, tensors[rank]), reference("all_to_all", tensors, rank))
        assert plan.explain().choice.slices == slices

    in_world(2, rank_main, [0, 1])


def test_slices_that_the_planner_chooses():
    """Next to nothing to hide behind: one message. Much to hide: several, so that the first leaves early."""

    def rank_main(rank):
        short = tx.all_to_all((1024, 1024), torch.float32, compute_s=0.0)
        long = tx.all_to_all((1024, 1024), torch.float32, compute_s=0.02)
        return [{t.slices for t in plan._state.outbox.transfers.values() if t.elements} for plan in (short, long)]

    (short, long), other = in_world(2, rank_main, [0, 1])
    assert [short, long] == other
    assert short == {1} and min(long) >= 4


def test_hierarchical_where_there_are_no_sums():
    def rank_main(rank):
        moves = tx.all_gather((64, 1024), torch.float32)
        sums = tx.all_reduce((64, 1024), torch.float32)
        assert "does not sum in the order of ranks" in str(sums.explain())
        assert not sums._state.placement.is_hierarchical
        assert moves._state.placement.is_hierarchical == (moves.explain().choice.schedule == "hierarchical")
        assert tx.all_to_all((64, 64), torch.float32, schedule="direct")._state.placement.is_hierarchical is False
        asked = tx.all_reduce((64, 64), torch.float32, schedule="hierarchical")
        assert asked._state.placement.is_hierarchical and asked.explain().choice.schedule == "hierarchical"
        return moves.explain().choice

    assert len(set(in_world(4, rank_main, [0, 0, 1, 1]))) == 1


def test_ranks_that_wish_different_things():
    def rank_main(rank, **first):
        tx.all_reduce(SMALL, torch.float32, **({} if rank else first))

    with pytest.raises(PlanError, match="ranks disagree on a plan: shots is 1 on rank 0 and None on rank 1"):
        in_world(2, partial(rank_main, shots=1))
    with pytest.raises(PlanError, match="ranks disagree on a plan: schedule is ring on rank 0 and None on rank 1"):
        in_world(2, partial(rank_main, schedule="ring"))


@pytest.mark.parametrize("wish", [{"shots": 3}, {"slices": 0}, {"compute_s": -1.0}, {"compute_s": float("inf")}])
def test_wishes_that_cannot_be(wish):
    ((name, _),) = wish.items()
    with pytest.raises(PlanError, match=f"{name}="):
        Wishes(**wish)


def test_one_shot_is_not_hierarchical():
    with pytest.raises(PlanError, match="use shots=2"):
        in_world(2, lambda rank: tx.all_reduce(SMALL, torch.float32, shots=1, schedule="hierarchical"))


GPU = DeviceType("gpu", 1 << 30, 1e12, 1e10)


def written(tmp_path, monkeypatch, cluster, hosts=None):
    monkeypatch.setenv("TRITON_EXT_CLUSTER", str(cluster_files.write(tmp_path, cluster, hosts)))


def test_the_cluster_file_decides(tmp_path, monkeypatch):
    """Over a fabric on which bytes cost nothing and a step much, a large sum takes one shot too."""

    def rank_main(rank):
        return shots_of(tx.all_reduce(LARGE, torch.float32))

    assert in_world(2, rank_main) == [2, 2]
    written(tmp_path, monkeypatch, Cluster((GPU,), (Node("here", ("gpu",) * 2, Fabric(1e12, 1e-2)),)))
    assert in_world(2, rank_main) == [1, 1]


def test_a_cluster_file_of_another_job(tmp_path, monkeypatch):
    def rank_main(rank):
        tx.all_reduce(SMALL, torch.float32)

    written(tmp_path, monkeypatch, presets.cpu_hosts([2]))
    with pytest.raises(PlanError, match="the cluster has 2 devices, and rank 2 of the job makes a plan"):
        in_world(3, rank_main)
    written(tmp_path, monkeypatch, presets.cpu_hosts([1, 2]))
    with pytest.raises(
        PlanError, match="ranks 0 and 1 of the job are on one host, devices 0 and 1 of the cluster are not"
    ):
        in_world(3, rank_main)
    monkeypatch.setenv("TRITON_EXT_CLUSTER", str(tmp_path / "none.yaml"))
    with pytest.raises(PlanError, match=r"TRITON_EXT_CLUSTER=.*none.yaml: .*No such file"):
        in_world(2, rank_main)


def test_a_subgroup_has_its_devices_of_the_cluster(tmp_path, monkeypatch):
    """Ranks 1 and 2 of the job, on different hosts."""
    written(tmp_path, monkeypatch, presets.cpu_hosts([2, 2]))

    def rank_main(rank):
        if rank in (1, 2):
            return tx.all_reduce(SMALL, torch.float32, group=tx.testing.subgroup([1, 2])).explain().request.group

    assert in_world(4, rank_main, [0, 0, 1, 1]) == [None, (1, 2), (1, 2), None]


def test_a_probe_of_hosts_whose_ranks_do_not_follow_each_other(tmp_path, monkeypatch):
    """The cluster's devices are host by host; which rank each is, the measurements beside it say."""

    def rank_main(rank):
        group = tx.testing.subgroup([1, 2]) if rank in (1, 2) else None
        return tx.all_reduce(SMALL, torch.float32, group=group).explain().request.group if group else None

    written(tmp_path, monkeypatch, presets.cpu_hosts([2, 2]), ["a", "b", "a", "b"])
    assert in_world(4, rank_main, [0, 1, 0, 1]) == [None, (2, 1), (2, 1), None]
    written(tmp_path, monkeypatch, presets.cpu_hosts([2, 2]), ["a", "b", "a"])
    with pytest.raises(PlanError, match="the cluster has 4 devices, and rank 3 of the job makes a plan"):
        in_world(4, lambda rank: tx.all_reduce(SMALL, torch.float32), [0, 1, 0, 1])


def test_what_travels_counts():
    """Partial values of half the size: half the time for them."""
    full = Question("reduce_scatter", 1 << 22, "float32", "float32", ("a", "b"), (0, 1), Wishes(slices=1))
    half = replace(full, wire_dtype="bfloat16")
    times = [question.decide().chosen for question in (full, half)]
    assert times[1].sent_bytes * 2 == times[0].sent_bytes
    assert 1.8 < times[0].standalone_s / times[1].standalone_s < 2


def test_hosts_whose_ranks_do_not_follow_each_other():
    question = Question(
        "all_to_all", 1 << 20, "float32", "float32", ("b", "a", "b", "a", "b"), tuple(range(5)), Wishes()
    )
    assert question.decide().request.group == (0, 3, 1, 4, 2)
    alike = replace(question, hosts=("a", "a", "a", "b", "b"))
    assert question.decide().candidates == alike.decide().candidates


@pytest.mark.parametrize("most", [1, 2, 7, 100])
@pytest.mark.parametrize("rows", [0, 1, 5, 50])
def test_at_most_so_many_slices(most, rows):
    transfer = Transfer((0, 0), (rows, 8), 0, (8, 1), 4, most_slices=most)
    assert transfer.slices <= min(most, rows)
    assert (
        transfer.slice_size * max(transfer.slices - 1, 0)
        < max(rows, 1)
        <= transfer.slice_size * max(transfer.slices, 1)
    )


def test_the_layout_carries_the_number_of_slices():
    where: Layout = replace(layout.all_to_all([(64, 8)] * 2, 0, 0), slices=4)
    spec = tx.language.core.dialect.Spec("all_to_all", 2, "fp32", "fp32", "fp32", 0, 4)
    found = transfers.outgoing(spec, where, 0, 1, {0: 4, 1: 4} | dict.fromkeys(range(64), 4))
    assert {t.slices for t in found.values() if t.elements} == {4}
