"""Clusters that the tests of schedules share."""

from hypothesis import strategies as st

from triton_ext.planner.cluster import Cluster, DeviceType, Fabric, Node, star
from triton_ext.planner.schedules import Request

GPU = DeviceType("gpu", 16 << 30, 100e12, 900e9)


def one_node(world: int, latency_s: float = 2e-6, bandwidth_bytes_per_s: float = 25e9) -> Cluster:
    return Cluster((GPU,), (Node("node", ("gpu",) * world, Fabric(bandwidth_bytes_per_s, latency_s)),))


def several(
    sizes: list[int],
    fabric_bytes_per_s: float = 300e9,
    link_bytes_per_s: float | list[float] = 25e9,
    fabric_s: float = 3e-6,
    link_s: float = 5e-6,
) -> Cluster:
    """Nodes of these sizes around a switch."""
    nodes = [Node(f"n{i}", ("gpu",) * size, Fabric(fabric_bytes_per_s, fabric_s)) for i, size in enumerate(sizes)]
    widths = link_bytes_per_s if isinstance(link_bytes_per_s, list) else [link_bytes_per_s] * len(sizes)
    return star([GPU], nodes, {node.name: width for node, width in zip(nodes, widths, strict=True)}, link_s)


def sizes(most: int = 9) -> st.SearchStrategy[list[int]]:
    """Of nodes, uneven ones too, 1 to `most` devices altogether."""
    return st.lists(st.integers(1, most), min_size=1, max_size=most).filter(lambda each: sum(each) <= most)


BANDWIDTHS = st.sampled_from([1e8, 1e9, 25e9, 300e9])


@st.composite
def clusters(draw: st.DrawFn, most: int = 9) -> Cluster:
    """Uneven nodes with links of different widths."""
    each = draw(sizes(most))
    widths = [draw(BANDWIDTHS) for _ in each]
    return several(
        each, draw(BANDWIDTHS), widths, draw(st.sampled_from([0.0, 1e-6])), draw(st.sampled_from([0.0, 9e-6]))
    )


def destinations(draw: st.DrawFn, world: int) -> tuple[int | None, ...]:
    """Of a put: no rank gets two tensors, some get none."""
    order = draw(st.permutations(range(world)))
    return tuple(rank if draw(st.booleans()) else None for rank in order)


@st.composite
def requests(draw: st.DrawFn, cluster: Cluster, most_elements: int = 1 << 20, **fixed: object) -> Request:
    """Any collective on all devices of a cluster, in any order."""
    world = len(cluster.devices)
    collective = draw(st.sampled_from(["all_to_all", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "put"]))
    return Request(
        **{
            "collective": collective,
            "tensor_bytes": 4 * draw(st.integers(0, most_elements)),
            "dtype": "float32",
            "tiles": draw(st.integers(1, 100)),
            "tile_compute_s": draw(st.sampled_from([0.0, 1e-7, 1e-5])),
            "group": tuple(draw(st.permutations(range(world)))),
            "slices": (1, 3, 8),
            "root": draw(st.integers(0, world - 1)) if collective == "broadcast" else 0,
            "destinations": destinations(draw, world) if collective == "put" else (),
            **fixed,
        }
    )
