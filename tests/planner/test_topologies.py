"""Clos networks, and the public list of hosts."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from networks import GPU, clos, node
from triton_ext.errors import ClusterError
from triton_ext.planner.topologies import ClosLinks, lingjun, two_layers
from triton_ext.planner.topologies import clos as clos_of

LINKS = ClosLinks(2, 8.0, 4.0, 16.0)


def test_two_layers() -> None:
    cluster = clos(3, 2, 4, 10, 5)
    assert len(cluster.links) == 2 * (3 * 2 + 3 * 4) and len(cluster.devices) == 48
    assert [len(path) for path in cluster.paths(0, 1)] == [2]
    paths = cluster.paths(0, 5)
    assert len(paths) == len(set(paths)) == 4
    for path in paths:
        links = [cluster.links[i] for i in path]
        assert links[0].source == "host0" and links[-1].destination == "host5"
        assert all(a.destination == b.source for a, b in itertools.pairwise(links))
        assert min(link.bandwidth_bytes_per_s for link in links) == 5


def test_impossible_networks() -> None:
    with pytest.raises(ClusterError, match="0 aggregation switches"):
        clos(1, 1, 0, 1, 1)
    with pytest.raises(ClusterError, match="without nodes"):
        two_layers(GPU, node("h"), 0, 4, LINKS)
    with pytest.raises(ClusterError, match="bandwidth_bytes_per_s is 0"):
        clos_of((GPU,), {"p": {"r": [node("a")]}, "q": {"s": [node("b")]}}, ClosLinks(1, 1.0, 1.0))


def write(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(["ip,DSW,PSW,ASW", *rows]) + "\n")
    return path


def test_hosts_of_a_list(tmp_path: Path) -> None:
    rows = ["x,G6,P1,S1", "y,G6,P1,S1", "z,G6,P1,S2", "w,G6,P2,S1"]
    cluster = lingjun(write(tmp_path / "topo.csv", rows), GPU, node("h"), LINKS)
    assert [n.name for n in cluster.nodes] == ["P1-S1-h0", "P1-S1-h1", "P1-S2-h0", "P2-S1-h0"]
    assert [len(cluster.paths(0, other)[0]) for other in (1, 2, 3)] == [2, 4, 6]
    assert [len(cluster.paths(0, other)) for other in (1, 2, 3)] == [1, 2, 2]
    assert lingjun(write(tmp_path / "topo.csv", rows[::-1]), GPU, node("h"), LINKS) == cluster


def test_files_that_are_no_list(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot be read"):
        lingjun(tmp_path / "none.csv", GPU, node("h"), LINKS)
    (tmp_path / "other.csv").write_text("ip,ASW\nx,S1\n")
    with pytest.raises(ClusterError, match="no column 'DSW'"):
        lingjun(tmp_path / "other.csv", GPU, node("h"), LINKS)
    for row in ("x,G6,P1", "x", "x,G6,,S1", "x,G6,P1,S1,more"):
        with pytest.raises(ClusterError, match=r"short.csv: line 3: a row has a cell for each column"):
            lingjun(write(tmp_path / "short.csv", ["y,G6,P1,S1", row]), GPU, node("h"), LINKS)
    with pytest.raises(ClusterError, match=r"long.csv: line 2: it is not CSV: field larger than"):
        lingjun(write(tmp_path / "long.csv", ["y,G6,P1,S1", "x" * 200_000]), GPU, node("h"), LINKS)
    with pytest.raises(ClusterError, match="without nodes"):
        lingjun(write(tmp_path / "empty.csv", []), GPU, node("h"), LINKS)


def test_the_public_hosts() -> None:
    data = Path(os.environ.get("TRITON_EXT_DATA", Path(__file__).parents[3] / "shared" / "data"))
    table = data / "planner" / "lingjun2023" / "topo.csv"
    if not table.is_file():
        pytest.skip(f"{table} is not there; TRITON_EXT_DATA names the folder of the public data")
    cluster = lingjun(table, GPU, node("h"), LINKS)
    assert len(cluster.nodes) == 847
    # 119 racks in 3 pods, 2 aggregation switches a pod, 2 cores.
    assert len(cluster.switches) == 119 + 3 * 2 + 2
    assert len(cluster.links) == 2 * (847 + 119 * 2 + 3 * 2)
    assert len(cluster.paths(0, 846)) == 2
