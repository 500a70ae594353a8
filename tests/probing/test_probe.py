"""triton-ext probe: what it measures between real ranks, and what it writes."""

import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from distributed.harness import run, run_on_hosts
from emulation import require_hosts
from triton_ext.cli import app
from triton_ext.errors import ProbeError
from triton_ext.planner import cluster_file, measured_cluster, measurements, presets
from triton_ext.planner.schedules import UNFUSED, Request, choose
from triton_ext.probing import collectives, devices, measure, messages


def probe(rank, tell, quick):
    if quick:
        messages.SIZES, messages._PER_SIZE_S, messages._REPETITIONS = messages.SIZES[:6], 0.005, (2, 8)
        messages._LOADED_S, devices._SECONDS = 0.01, 0.01
        devices._LARGEST["cpu"] = 512
        collectives._SIZES, collectives._REPETITIONS = collectives._SIZES[:3], (2, 3)
    steps = []
    measured = measure.measure(torch.device("cpu"), dist.group.WORLD, lambda *step: steps.append(step))
    assert all(0 <= done <= of for _, done, of in steps)
    return measured


def flat(world):
    """A cluster of as many devices on one node."""
    return presets.cluster({"A100-40": world}, devices_per_node=world)


def pairs(world):
    return [(a, b) for a in range(world) for b in range(world) if a != b]


@pytest.mark.parametrize("world", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_ranks_of_one_host(world, tmp_path):
    measured, *others = run(world, probe, True)
    assert all(other == measured for other in others)  # known to all
    assert [(host, len(ranks)) for host, ranks in measured.hosts] == [(measured.ranks[0].host, world)]
    for load in ("alone", "both_ways", "all_pairs"):
        found = [t for t in measured.transfers if (t.transport, t.load) == ("messages", load)]
        assert [(t.source, t.destination) for t in found] == pairs(world)
        for transfer in found:
            sizes = [point.bytes for point in transfer.points]
            assert sizes[0] == 8 and sizes == sorted(sizes) and len(sizes) >= 4
            assert all(0 < point.fastest_s <= point.seconds for point in transfer.points)
    for load in ("alone", "all_pairs"):
        found = [t for t in measured.transfers if (t.transport, t.load) == ("memory", load)]
        assert [(t.source, t.destination) for t in found] == pairs(world)
    kinds = measure._COLLECTIVES if world > 1 else ()
    assert tuple(dict.fromkeys(each.collective for each in measured.collectives)) == kinds
    for point in measured.unfused():
        request = Request(point.collective, point.tensor_bytes, "float32", 4, 1e-4, tuple(range(world)))
        decision = choose(request, flat(world), measured=measured.unfused())
        unfused = [candidate for candidate in decision.candidates if candidate.choice.schedule == UNFUSED]
        assert unfused[0].standalone_s == point.standalone_s and unfused[0].basis.startswith("measured")
    for rank in measured.ranks:
        assert rank.device_type == "cpu" and rank.device and rank.threads == 1
        assert rank.memory_bytes > 1 << 28 and rank.float32_flop_per_s > 1e8 and rank.bfloat16_flop_per_s > 1e7
        assert rank.memory_bandwidth_bytes_per_s > 1e8
    for transport in ("messages", "memory"):
        cluster_file.dump(measured_cluster.cluster(measured, transport), tmp_path / "c.yaml")
        assert len(cluster_file.load(tmp_path / "c.yaml").devices) == world


@pytest.mark.slow
def test_two_ranks_on_each_of_two_hosts():
    require_hosts()
    measured, *_ = run_on_hosts(2, 2, probe, True, rate="1gbit")
    assert [ranks for _, ranks in measured.hosts] == [(0, 1), (2, 3)]
    assert len({host for host, _ in measured.hosts}) == 2
    stored = [(t.source, t.destination) for t in measured.transfers if (t.transport, t.load) == ("memory", "alone")]
    assert stored == [(0, 1), (1, 0), (2, 3), (3, 2)]
    cluster = measured_cluster.cluster(measured)
    assert [len(node.device_types) for node in cluster.nodes] == [2, 2]
    assert 0.02e9 < cluster.bandwidth_bytes_per_s(0, 1) < 0.25e9  # 0.12e9 on a machine with nothing else to do


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "bytes_per_s"), [("1gbit", 125e6), ("100mbit", 12.5e6)])
def test_a_link_of_known_rate(rate, bytes_per_s):
    """Within a tenth: headers of TCP, IP and Ethernet take 4.4 % of it. A machine that is busy with something else
    carries less: one of three measurements must find it quiet enough."""
    require_hosts()
    for _ in range(3):
        measured, *_ = run_on_hosts(2, 1, probe, False, rate=rate)
        cluster = measured_cluster.cluster(measured)
        found = [measured.transfer(a, b).line.bandwidth_bytes_per_s for a, b in ((0, 1), (1, 0))]
        found += [cluster.bandwidth_bytes_per_s(a, b) for a, b in ((0, 1), (1, 0))]
        if found == pytest.approx([bytes_per_s] * 4, rel=0.1):
            return
    raise AssertionError(f"{found} bytes/s on links of {rate}")


def silent(rank, tell):
    os.environ["TRITON_EXT_TIMEOUT_S"] = "1"
    control = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 1:
        time.sleep(4)
        return None
    with pytest.raises(ProbeError, match="rank 0 of 2: a rank did not answer: "):
        measure.measure(torch.device("cpu"), control, lambda *_: None)
    return None


def test_a_rank_that_does_not_answer():
    run(2, silent)


def test_without_torchrun_it_says_what_to_type(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(app, ["probe"])
    assert result.exit_code == 1
    assert "torchrun --nproc-per-node 4 -m triton_ext probe -o cluster.yaml" in result.output


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "triton_ext", "probe"]
    done = subprocess.run([*command, "--fabric", "memory", "-o", str(tmp_path / "c.json")], capture_output=True,
                          text=True, timeout=200, check=True)  # fmt: skip
    assert done.stdout.count("Ranks, all at work at once") == 1
    assert f"{tmp_path}/c.json: 2 devices on 1 host" in done.stdout
    measured = measurements.load(tmp_path / "c.measured.json")
    cluster_file.dump(measured_cluster.cluster(measured, "memory"), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "c.json").read_text()
    assert len(cluster_file.load(tmp_path / "c.json").devices) == 2
