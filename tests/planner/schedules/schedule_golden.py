"""The decisions that golden.md holds. Run as a script, writes it."""

from pathlib import Path

from triton_ext.planner import presets
from triton_ext.planner.cluster import Cluster, DeviceType, Fabric, Node, star
from triton_ext.planner.schedules import ON_GPU, Request, choose

GPU = DeviceType("gpu", 16 << 30, 100e12, 900e9)


def _nodes(*sizes: int) -> Cluster:
    nodes = [Node(f"n{i}", ("gpu",) * size, Fabric(300e9, 3e-6)) for i, size in enumerate(sizes)]
    return star([GPU], nodes, 25e9, 5e-6)


CLUSTERS = {
    "8": _nodes(8),
    "4+4": _nodes(4, 4),
    "5+2+1": _nodes(5, 2, 1),
    "1+1+1": _nodes(1, 1, 1),
    "6 A100 + 3 V100": presets.cluster({"A100-40": 6, "V100-16": 3}),
}
COLLECTIVES = ("all_reduce", "all_to_all", "reduce_scatter", "all_gather", "broadcast")


def table() -> str:
    lines = [
        "# What is chosen",
        "",
        "Written by `PYTHONPATH=. python tests/planner/schedules/schedule_golden.py`; compute: of the whole tensor.",
        "",
        "| ranks by node | collective | KiB | compute us | chosen | total us | exposed us | alone us |",
        "|---|---|---:|---:|---|---:|---:|---:|",
    ]
    for name, cluster in CLUSTERS.items():
        for collective in COLLECTIVES:
            for kib in (4, 256, 16384):
                for compute_us in (0, 200):
                    group = tuple(range(len(cluster.devices)))
                    tile_s = compute_us * 1e-6 / 256
                    request = Request(
                        collective, kib << 10, "bfloat16", 256, tile_s, group, slices=(1, 4, 16), costs=ON_GPU
                    )
                    chosen = choose(request, cluster).chosen
                    times = (chosen.total_s, chosen.exposed_s, chosen.standalone_s)
                    numbers = " | ".join(f"{seconds * 1e6:.1f}" for seconds in times)
                    lines.append(f"| {name} | {collective} | {kib} | {compute_us} | {chosen.choice} | {numbers} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("golden.md").write_text(table())
