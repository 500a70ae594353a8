"""Measurements as tables, from made-up ones."""

import io

from rich.console import Console

from triton_ext.planner.measurements import CollectiveTime, Measurements, Point, RankFigures, Transfer
from triton_ext.probing import report


def measurements(hosts, ranks_per_host):
    """Of ranks whose messages take 10 us inside a host and 50 us between hosts, at 2 and at 0.5 GB/s."""
    ranks = [RankFigures(f"h{host}", "AMD", "cpu", 1, 1 << 30, 1e11, 2e11, 1e10) for host in range(hosts)
             for _ in range(ranks_per_host)]  # fmt: skip
    transfers = []
    for a in range(len(ranks)):
        for b in range(len(ranks)):
            near = ranks[a].host == ranks[b].host
            latency_s, width = (10e-6, 2e9) if near else (50e-6, 0.5e9)
            points = tuple(
                Point(size, latency_s + size / width, latency_s + size / width, 5) for size in (8, 1 << 20, 1 << 22)
            )
            for transport, load in (("messages", "alone"), ("memory", "alone")):
                if a != b and (near or transport == "messages"):
                    transfers.append(Transfer(a, b, transport, load, points))
    times = (CollectiveTime("all_reduce", 4096, 1e-3, 1e-3, 5), CollectiveTime("all_reduce", 1 << 20, 1.5, 1.0, 5),
             CollectiveTime("broadcast", 4096, 2e-4, 1e-4, 5))  # fmt: skip
    return Measurements("gloo", tuple(ranks), tuple(transfers), times)


def rows(table):
    """The text of a table's rows, without lines."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    lines = [line for line in console.export_text().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_a_row_for_each_pair():
    found = rows(report.transfers(measurements(2, 2)))
    assert len(found) == 12
    assert found[0] == ["0", "1", "10", "", "2", "", "", "10", "2", ""]
    assert found[1] == ["0", "2", "50", "", "0.5", "", "", "", "", ""]


def test_a_row_for_each_pair_of_hosts_where_ranks_are_many():
    found = rows(report.transfers(measurements(2, 4)))
    assert [row[:3] + row[4:5] for row in found] == [
        ["h0", "its own ranks", "10", "2"],
        ["h0", "h1", "50", "0.5"],
        ["h1", "h0", "50", "0.5"],
        ["h1", "its own ranks", "10", "2"],
    ]
    assert len(rows(report.transfers(measurements(8, 1)))) == 56  # hosts of one rank have no ranks of their own


def test_collectives_by_size():
    table = report.collectives(measurements(1, 2))
    assert [column.header for column in table.columns] == ["", "4 KiB", "1 MiB"]
    assert rows(table) == [["all_reduce", "1", "1500"], ["broadcast", "0.2", ""]]


def test_ranks():
    assert rows(report.ranks(measurements(1, 2)))[1] == ["1", "h0", "AMD", "1", "1", "0.1", "0.2", "10"]
