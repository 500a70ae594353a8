"""Links that break, hosts that die, networks that are slow: right results, or an error on every rank that is left."""

import os
import time

import pytest
import torch
import torch.distributed as dist

import triton_ext as tx
from collectives import assert_close, inputs, launch, make_plan, reference
from distributed import harness
from emulation import require_hosts

SHAPE = (64, 48)
CHECKED = ["all_to_all", "all_reduce", "all_gather"]


@pytest.fixture(autouse=True)
def _hosts():
    require_hosts()
    yield
    namespaces = os.listdir("/run/netns") if os.path.isdir("/run/netns") else []
    assert not [name for name in namespaces if f"-{os.getpid()}-" in name]


def _plans(rank, schedule="direct"):
    world = dist.get_world_size()
    return {name: make_plan(name, SHAPE, torch.float32, rank, world, schedule=schedule) for name in CHECKED}


def _checked_run(plans, rank, seed):
    for name, plan in plans.items():
        tensors = inputs(dist.get_world_size(), SHAPE, torch.float32, seed)
        assert_close(launch(plan, tensors[rank]), reference(name, tensors, rank).float())


def _runs_for_seconds(rank, tell, seconds, schedule="direct"):
    plans = _plans(rank, schedule)
    _checked_run(plans, rank, 0)
    tell("ready")
    seed, end = 1, time.monotonic() + seconds
    while True:
        go_on = torch.tensor([time.monotonic() < end])
        dist.broadcast(go_on, 0)
        if not go_on:
            return seed
        _checked_run(plans, rank, seed)
        seed += 1


def _runs(job):
    """How many runs each rank of _runs_for_seconds made."""
    ranks = range(len(job.processes))
    assert [job.receive(rank) for rank in ranks] == ["ready"] * len(ranks)
    return min(job.receive(rank) for rank in ranks)


def _until_an_error(rank, tell, schedule="direct"):
    plans = _plans(rank, schedule)
    _checked_run(plans, rank, 0)
    tell("ready")
    seed, end = 1, time.monotonic() + 40
    try:
        while time.monotonic() < end:
            _checked_run(plans, rank, seed)
            seed += 1
        tell("never noticed")
    except tx.errors.CollectiveTimeout as error:
        tell(f"{type(error).__name__}: {error}")
    os._exit(0)  # gloo has lost a member, and would complain


@pytest.mark.parametrize(
    ("hosts", "ranks_per_host", "schedule"),
    [
        (2, 2, "hierarchical"),
        (3, 1, "direct"),
        pytest.param(2, 2, "direct", marks=pytest.mark.slow),
        pytest.param(3, 1, "hierarchical", marks=pytest.mark.slow),
    ],
)
def test_all_collectives(hosts, ranks_per_host, schedule):
    with harness.HostsJob(hosts, ranks_per_host, _runs_for_seconds, 2, schedule) as job:
        assert _runs(job) > 1


@pytest.mark.parametrize("options", [{"rate": "1mbit"}, {"mtu_bytes": 576}])
def test_poor_networks(options):
    with harness.HostsJob(2, 1, _runs_for_seconds, 2, **options) as job:
        assert _runs(job) > 1


def test_a_link_that_comes_back():
    with harness.HostsJob(2, 1, _runs_for_seconds, 6) as job:
        assert [job.receive(rank) for rank in range(2)] == ["ready"] * 2
        time.sleep(0.5)
        job.hosts.cut(1)
        time.sleep(2)
        job.hosts.restore(1)
        assert min(job.receive(rank) for rank in range(2)) > 1


@pytest.mark.parametrize("schedule", ["hierarchical", pytest.param("direct", marks=pytest.mark.slow)])
def test_a_link_that_stays_cut(monkeypatch, schedule):
    monkeypatch.setenv("TRITON_EXT_TIMEOUT_S", "3")
    with harness.HostsJob(2, 2, _until_an_error, schedule) as job:
        assert [job.receive(rank) for rank in range(4)] == ["ready"] * 4
        time.sleep(0.3)
        job.hosts.cut(1)
        cut = time.monotonic()
        for rank in range(4):
            assert job.receive(rank, 30).startswith(("CollectiveTimeout", "PeerLost"))
        assert time.monotonic() - cut < 15


def test_a_host_that_dies():
    with harness.HostsJob(3, 1, _until_an_error) as job:
        assert [job.receive(rank) for rank in range(3)] == ["ready"] * 3
        time.sleep(0.3)
        job.processes[2].kill()
        killed = time.monotonic()
        for rank in range(2):
            text = job.receive(rank, 30)
            assert text.startswith("PeerLost") and "rank 2" in text, text
        assert time.monotonic() - killed < 10, "noticed long before the timeout"


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 3])  # a gateway, and a rank that has one
def test_a_rank_of_a_hierarchy_that_dies(killed):
    with harness.HostsJob(2, 2, _until_an_error, "hierarchical") as job:
        assert [job.receive(rank) for rank in range(4)] == ["ready"] * 4
        time.sleep(0.3)
        job.processes[killed].kill()
        start = time.monotonic()
        for rank in {*range(4)} - {killed}:
            text = job.receive(rank, 30)
            assert text.startswith("PeerLost") and f"rank {killed}" in text, text
        assert time.monotonic() - start < 10, "noticed long before the timeout"


def _never_starts(rank, tell):
    plans = _plans(rank)
    if rank == 1:
        tell(None)
        time.sleep(8)
        os._exit(0)
    texts = []
    for plan in plans.values():
        with pytest.raises(tx.errors.CollectiveTimeout) as info:
            launch(plan, torch.ones(SHAPE))
        texts.append(str(info.value))
    tell(texts)
    os._exit(0)


def test_a_peer_that_never_starts(monkeypatch):
    monkeypatch.setenv("TRITON_EXT_TIMEOUT_S", "1")
    with harness.HostsJob(2, 1, _never_starts) as job:
        assert all("waited 1 s for rank 1" in text for text in job.receive(0))


def _never_plans(rank, tell):
    if rank == 1:
        time.sleep(6)
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(tx.errors.PlanError, match="not all ranks joined the job, or made a plan, within 1 s"):
        tx.all_reduce(SHAPE, torch.float32)
    tell(time.monotonic() - start)
    os._exit(0)


def test_a_peer_that_never_makes_the_plan(monkeypatch):
    monkeypatch.setenv("TRITON_EXT_TIMEOUT_S", "1")
    with harness.HostsJob(2, 1, _never_plans) as job:
        assert job.receive(0) < 5


def _two_jobs(rank, tell):
    jobs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = jobs[rank % 2]
    me = dist.get_rank(mine)
    plan = tx.all_to_all(SHAPE, torch.float32, group=mine)
    for seed in range(30):
        tensors = inputs(2, SHAPE, torch.float32, 100 * (rank % 2) + seed)
        assert_close(launch(plan, tensors[me]), reference("all_to_all", tensors, me))
    return True


def test_two_jobs_on_one_link():
    assert harness.run_on_hosts(2, 2, _two_jobs, rate="100mbit") == [True] * 4


def _sends_and_leaves(rank, tell, root=0, schedule="direct"):
    """The rows take a while on the link, and the root has nothing to wait for."""
    shape, world = (512, 512), dist.get_world_size()
    tensors = inputs(world, shape, torch.float32)
    for _ in range(3):
        plan = tx.broadcast(shape, torch.float32, root=root, schedule=schedule)
        if rank == world - 1:
            time.sleep(0.1)
        assert_close(launch(plan, tensors[rank]), tensors[root])
        plan.free()
    last = tx.broadcast(shape, torch.float32, root=root, schedule=schedule)
    if rank == world - 1:
        time.sleep(0.5)
    assert_close(launch(last, tensors[rank]), tensors[root])
    return True  # and the process ends


def test_what_a_plan_has_taken_arrives_although_it_ends():
    assert harness.run_on_hosts(2, 1, _sends_and_leaves, rate="100mbit") == [True] * 2


@pytest.mark.parametrize("root", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_gateway_serves_its_host_to_the_end(root):
    """Rank 0 is the gateway of rank 1; both have nothing to wait for."""
    assert harness.run_on_hosts(2, 2, _sends_and_leaves, root, "hierarchical", rate="100mbit") == [True] * 4


def _many_plans(rank, tell, schedule):
    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def use():
        plan = tx.all_reduce(SHAPE, torch.float32, schedule=schedule)
        launch(plan, torch.ones(SHAPE))
        plan.free()
        dist.barrier()

    for _ in range(5):
        use()
    time.sleep(1.5)  # connections close when the peer has closed its end
    before = held()
    for _ in range(30):
        use()
    time.sleep(1.5)
    return before, held()


@pytest.mark.parametrize(
    ("ranks_per_host", "schedule"), [(1, "direct"), pytest.param(2, "hierarchical", marks=pytest.mark.slow)]
)
def test_plans_leave_nothing_behind(ranks_per_host, schedule):
    for before, after in harness.run_on_hosts(2, ranks_per_host, _many_plans, schedule):
        assert after[0] <= before[0] and after[1] <= before[1]
