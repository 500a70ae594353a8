"""Measured points: the line through them, the file, and the cluster they make."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_ext.errors import ClusterError
from triton_ext.planner import cluster_file, measured_cluster, measurements
from triton_ext.planner.measurements import CollectiveTime, Measurements, Point, RankFigures, Transfer, fit

SIZES = (8, 1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
GPU = RankFigures("a", "Some GPU (TM) 3000", "Some-GPU-3000", 1, 16 << 30, 1e12, 2e12, 1e11)


def points(latency_s, bandwidth_bytes_per_s):
    times = [latency_s + size / bandwidth_bytes_per_s for size in SIZES]
    return tuple(Point(size, time, time, 5) for size, time in zip(SIZES, times, strict=True))


def group(hosts, speed, loaded=None, ranks=None):
    """Ranks on the named hosts; speed(a, b) gives a pair's latency and bandwidth, and loaded(a, b) those under load."""
    ranks = ranks or [dataclasses.replace(GPU, host=host) for host in hosts]
    pairs = [(a, b) for a in range(len(hosts)) for b in range(len(hosts)) if a != b]
    transfers = [Transfer(a, b, "messages", "alone", points(*speed(a, b))) for a, b in pairs]
    if loaded:
        transfers += [Transfer(a, b, "messages", "all_pairs", points(*loaded(a, b))) for a, b in pairs]
    return Measurements("gloo", tuple(ranks), tuple(transfers))


@given(st.floats(1e-7, 1e-2), st.floats(1e5, 1e12))
def test_a_line_is_found_again(latency_s, bandwidth_bytes_per_s):
    line = fit(points(latency_s, bandwidth_bytes_per_s))
    assert line.latency_s == pytest.approx(latency_s, rel=1e-2, abs=0.1 / bandwidth_bytes_per_s)
    if SIZES[-1] / bandwidth_bytes_per_s > 10 * line.latency_s:
        assert line.bandwidth_bytes_per_s == pytest.approx(bandwidth_bytes_per_s, rel=1e-2)
        assert line.error < 0.02


@given(st.lists(st.floats(0.9, 1.1), min_size=len(SIZES), max_size=len(SIZES)))
def test_noise_of_a_tenth_moves_the_line_by_little_more(noise):
    noisy = [
        dataclasses.replace(p, seconds=p.seconds * factor) for p, factor in zip(points(1e-5, 1e9), noise, strict=True)
    ]
    assert fit(noisy).bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.15)


def test_a_line_needs_points():
    with pytest.raises(ClusterError, match="without points"):
        fit([])


@given(st.floats(1e-6, 1.0), st.floats(1e-3, 2.9))
def test_the_latency_counts_once_where_it_is_most_of_the_time(latency_s, share):
    """No size takes four times as long as the smallest: the line goes through the first and the last point."""
    line = fit(points(latency_s, SIZES[-1] / (share * latency_s)))
    assert line.error < 1e-3
    assert line.latency_s == pytest.approx(latency_s, rel=1e-3)
    (first, last) = Point(8, 1e-3, 1e-3, 5), Point(1 << 20, 1.1e-3, 1.1e-3, 5)
    line = fit([first, last])
    assert line.latency_s + last.bytes / line.bandwidth_bytes_per_s == pytest.approx(1.1e-3)
    slower = [dataclasses.replace(first, seconds=1.1e-3), dataclasses.replace(last, seconds=1e-3)]
    assert fit(slower).bandwidth_bytes_per_s == pytest.approx((1 << 20) / 1e-3)  # bytes cost nothing that was seen
    assert fit([last]).bandwidth_bytes_per_s == pytest.approx((1 << 20) / 1.1e-3)


def test_pairs_that_were_not_measured_are_named():
    measured = group("aab", lambda a, b: (2e-5, 1e8), lambda a, b: (2e-5, 1e8))
    with pytest.raises(ClusterError, match="memory from rank 0 to rank 1, both on host a, were not measured alone"):
        measured_cluster.cluster(measured, "memory")
    for gone, message in (((0, 1), "messages from rank 0 to rank 1"), ((1, 0), "messages from rank 1 to rank 0")):
        some = tuple(t for t in measured.transfers if (t.source, t.destination) != gone)
        with pytest.raises(ClusterError, match=message):
            measured_cluster.cluster(dataclasses.replace(measured, transfers=some))
    some = tuple(t for t in measured.transfers if t.source != 2)
    with pytest.raises(ClusterError, match=r"messages from host b \(rank 2\) to host a \(rank 0\) were not measured"):
        measured_cluster.cluster(dataclasses.replace(measured, transfers=some))


def test_written_and_read_again(tmp_path):
    measured = group("aab", lambda a, b: (1e-6 * (a + 1), 1e9 * (b + 1)), lambda a, b: (2e-6, 5e8))
    times = (CollectiveTime("all_reduce", 4096, 1e-3, 9e-4, 5), CollectiveTime("all_reduce", 8192, 2e-3, 1e-3, 5))
    measured = dataclasses.replace(measured, collectives=times)
    measurements.dump(measured, tmp_path / "m.json")
    again = measurements.load(tmp_path / "m.json")
    assert again == measured
    assert [(m.schedule, m.world, m.tensor_bytes, m.standalone_s) for m in again.unfused()] == [
        ("unfused", 3, 4096, 1e-3), ("unfused", 3, 8192, 2e-3)
    ]  # fmt: skip
    assert again.hosts == (("a", (0, 1)), ("b", (2,)))
    assert again.transfer(2, 0, load="all_pairs").line.bandwidth_bytes_per_s == pytest.approx(5e8, rel=1e-2)
    assert again.transfer(2, 0, "memory") is None


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["ranks"][0].pop("host"), r"m.json: ranks\[0\].host: missing"),
        (lambda d: d["transfers"][1]["points"][2].update(seconds=0), r"transfers\[1\].points\[2\].seconds: 0"),
        (lambda d: d["transfers"][0].update(source=7), r"transfers\[0\]: from 7 to 1, of 2 ranks"),
        (lambda d: d["transfers"][0].update(load="much"), r"transfers\[0\].load: 'much': input should be 'alone'"),
        (lambda d: d.update(more=1), r"more: no such field"),
    ],
)
def test_errors_name_the_field(tmp_path, edit, message):
    measurements.dump(group("ab", lambda a, b: (1e-6, 1e9)), tmp_path / "m.json")
    data = json.loads((tmp_path / "m.json").read_text())
    edit(data)
    (tmp_path / "m.json").write_text(json.dumps(data))
    with pytest.raises(ClusterError, match=message):
        measurements.load(tmp_path / "m.json")


def test_no_file(tmp_path):
    with pytest.raises(ClusterError, match="cannot be read"):
        measurements.load(tmp_path / "none.json")


def test_one_host(tmp_path):
    measured = group("aaa", lambda a, b: (3e-6, 4e9), lambda a, b: (9e-6, 1e9))
    cluster = measured_cluster.cluster(measured)
    assert [node.device_types for node in cluster.nodes] == [("Some-GPU-3000",) * 3] and not cluster.links
    # Each of three sends 1 GB/s to two others at once.
    assert cluster.bandwidth_bytes_per_s(0, 0) == pytest.approx(2e9, rel=0.02)
    assert cluster.latency_s(0, 0) == pytest.approx(3e-6, rel=0.01)
    assert cluster.device_type("Some-GPU-3000").peak_flop_per_s == 2e12
    cluster_file.dump(cluster, tmp_path / "c.yaml")
    assert cluster_file.load(tmp_path / "c.yaml").nodes == cluster.nodes


def test_hosts_with_links_of_their_own_speed_meet_at_a_switch():
    rates = {"a": 1e9, "b": 2e8, "c": 5e8}
    measured = group("abc", lambda a, b: (2e-5, min(rates["abc"[a]], rates["abc"[b]])))
    cluster = measured_cluster.cluster(measured)
    assert cluster.switches == ("switch",)
    for a in range(3):
        for b in range(3):
            if a != b:
                expected = min(rates["abc"[a]], rates["abc"[b]])
                assert cluster.bandwidth_bytes_per_s(a, b) == pytest.approx(expected, rel=0.02)
                assert cluster.latency_s(a, b) == pytest.approx(2e-5, rel=0.01)


def test_one_slow_pair_of_hosts_has_a_link_of_its_own():
    measured = group("abc", lambda a, b: (2e-5, 1e8 if (a, b) == (0, 1) else 1e9))
    cluster = measured_cluster.cluster(measured)
    assert not cluster.switches and len(cluster.links) == 6
    assert cluster.bandwidth_bytes_per_s(0, 1) == pytest.approx(1e8, rel=0.02)
    assert cluster.bandwidth_bytes_per_s(1, 0) == pytest.approx(1e9, rel=0.02)


def test_ranks_of_a_host_share_its_link():
    """Four pairs at once carry a quarter each of what one carries alone; or one alone cannot fill the link."""
    shared = group("aabb", lambda a, b: (2e-5, 1e8), lambda a, b: (2e-5, 2.5e7))
    assert measured_cluster.cluster(shared).bandwidth_bytes_per_s(0, 1) == pytest.approx(1e8, rel=0.02)
    wide = group("aabb", lambda a, b: (2e-5, 1e8), lambda a, b: (2e-5, 9e7))
    assert measured_cluster.cluster(wide).bandwidth_bytes_per_s(0, 1) == pytest.approx(3.6e8, rel=0.02)


def test_pairs_that_end_early_are_not_counted_twice():
    """Two pairs share a link of 1e8 and one has the smaller message: together they carry the sum in the longer time."""
    measured = group("aab", lambda a, b: (2e-5, 1e8))
    for source, nbytes, seconds in ((0, 1_000_000, 0.02), (1, 2_000_000, 0.03)):
        point = Point(nbytes, seconds, seconds, 5)
        loaded = Transfer(source, 2, "messages", "all_pairs", (points(1e-3, 1e12)[0], point))
        measured = dataclasses.replace(measured, transfers=(*measured.transfers, loaded))
    assert measured_cluster.cluster(measured).bandwidth_bytes_per_s(0, 1) == pytest.approx(1e8, rel=0.01)


def test_devices_of_one_name_and_another_speed_are_of_another_type():
    peaks = [2e12, 1e12, 1.05e12, 2.1e12]
    ranks = [dataclasses.replace(GPU, bfloat16_flop_per_s=peak) for peak in peaks]
    cluster = measured_cluster.cluster(group("aaaa", lambda a, b: (1e-6, 1e9), ranks=ranks))
    first, second = "Some-GPU-3000.1", "Some-GPU-3000.2"
    assert [device.type for device in cluster.devices] == [first, second, second, first]
    assert cluster.device_type(first).peak_flop_per_s == pytest.approx(2.05e12)
    ranks[1:3] = [dataclasses.replace(GPU, device_type="another") for _ in range(2)]
    cluster = measured_cluster.cluster(group("aaaa", lambda a, b: (1e-6, 1e9), ranks=ranks))
    assert [device.type for device in cluster.devices] == ["Some-GPU-3000", "another", "another", "Some-GPU-3000"]


@given(st.permutations(range(4)))
def test_the_order_of_transfers_does_not_matter(order):
    measured = group("aabc", lambda a, b: (1e-6 * (a + 1), 1e9), lambda a, b: (1e-6, 3e8))
    third = len(measured.transfers) // 4
    parts = [measured.transfers[i * third : (i + 1) * third] for i in range(4)]
    shuffled = dataclasses.replace(measured, transfers=tuple(t for i in order for t in parts[i]))
    assert measured_cluster.cluster(shuffled) == measured_cluster.cluster(measured)
