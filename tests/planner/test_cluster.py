"""The cluster model: what it accepts, its paths, and its files."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_ext.errors import ClusterError, PlanningError
from triton_ext.planner import cluster_file, measurements, presets
from triton_ext.planner.cluster import Cluster, DeviceType, Fabric, Link, Node, star
from triton_ext.planner.parallel import plan_file

GPU = DeviceType("gpu", 16 << 30, 100e12, 900e9)
FABRIC = Fabric(300e9, 3e-6)

TEXT = """
nodes:
  - {name: a, count: 2, devices: [{type: A100-40, count: 4}], fabric: {bandwidth_gb_per_s: 300, latency_us: 3}}
  - {name: b, devices: [{type: mine}, {type: V100-16, count: 2}], fabric: {bandwidth_gb_per_s: 1.5e1, latency_us: 0}}
device_types:
  mine: {memory_gib: 24, peak_tflop_per_s: 71, memory_bandwidth_gb_per_s: 936}
switches: [s]
links:
  - {from: a0, to: s, bandwidth_gb_per_s: 12.5, latency_us: 10}
  - {from: a1, to: s, bandwidth_gb_per_s: 125e-1, latency_us: 10}
  - {from: b, to: s, bandwidth_gb_per_s: 1, latency_us: 10, one_way: true}
  - {from: s, to: b, bandwidth_gb_per_s: 2, latency_us: 20, one_way: true}
"""


def load(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return cluster_file.load(path)


def test_a_file(tmp_path):
    cluster = load(tmp_path, TEXT)
    assert [node.name for node in cluster.nodes] == ["a0", "a1", "b"]
    assert [device.type for device in cluster.devices] == ["A100-40"] * 8 + ["mine", "V100-16", "V100-16"]
    assert cluster.device_type("A100-40") == presets.device_type("A100-40")
    assert cluster.device_type("mine").memory_bytes == 24 << 30
    assert cluster.bandwidth_bytes_per_s(2, 0) == 1e9 and cluster.bandwidth_bytes_per_s(0, 2) == 2e9
    assert cluster.bandwidth_bytes_per_s(0, 1) == 12.5e9 and cluster.bandwidth_bytes_per_s(2, 2) == 15e9
    assert cluster.latency_s(0, 2) == pytest.approx(30e-6) and cluster.latency_s(0, 0) == pytest.approx(3e-6)


@pytest.mark.parametrize("name", ["c.yaml", "c.json"])
def test_written_and_read_again(tmp_path, name):
    cluster = load(tmp_path, TEXT)
    cluster_file.dump(cluster, tmp_path / name)
    again = cluster_file.load(tmp_path / name)
    assert again.nodes == cluster.nodes and again.switches == cluster.switches and again.links == cluster.links
    assert again.device_types == cluster.device_types


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_gib: 24", "memory_gib: -1", r"cluster.yaml: device_types.mine.memory_gib: -1: .*greater than 0"),
        ("memory_gib: 24", "memory_gib: .inf", "device_types.mine.memory_gib: inf"),
        ("count: 4}", "count: 0}", r"nodes\[0\].devices\[0\].count: 0"),
        ("count: 4}", "count: many}", r"nodes\[0\].devices\[0\].count: 'many': .*integer"),
        ("latency_us: 20, ", "", r"links\[3\].latency_us: missing"),
        ("switches:", "switch:", "switch: no such field"),
        ("type: A100-40", "type: A1000", "no published device 'A1000'; there are A100-40, "),
        ("from: a1", "from: a2", "link a2 -> s: no node or switch is named 'a2'"),
        ("name: b", "name: s", "two nodes or switches are named 's'"),
        (
            "to: s, bandwidth_gb_per_s: 12.5",
            "to: a0, bandwidth_gb_per_s: 12.5",
            "link a0 -> a0: both ends",
        ),
        ("nodes:", "nodes: [", "neither YAML nor JSON"),
        ("name: b", "name: 2024-99-99", "cluster.yaml: line 4: '2024-99-99' looks like a timestamp, and is none"),
        ("name: b", "name: 0x_", "cluster.yaml: line 4: '0x_' looks like a int, and is none"),
        ("name: b", "name: !!int b", "cluster.yaml: line 4: 'b' looks like a int, and is none"),
        ("name: b", "name: !!bool b", "cluster.yaml: line 4: 'b' looks like a bool, and is none"),
        ("name: b", "name: !!timestamp b", "cluster.yaml: line 4: 'b' looks like a timestamp, and is none"),
        ("name: b", "name: b, name: c", "cluster.yaml: line 4: 'name' is there twice"),
        ("switches: [s]", "switches: [s]\nswitches: [t]", "cluster.yaml: line 8: 'switches' is there twice"),
        ("  mine: {", "  mine: &a {memory_gib: 1}\n  mine: {<<: *a, ", "cluster.yaml: line 7: 'mine' is there twice"),
        ("name: b", "name: " + "[" * 5000 + "]" * 5000, "cluster.yaml: it is nested too deeply"),
    ],
)
def test_errors_name_the_field(tmp_path, old, new, message):
    assert old in TEXT
    with pytest.raises(ClusterError, match=message):
        load(tmp_path, TEXT.replace(old, new, 1))


def test_a_merge_may_be_overridden(tmp_path):
    base = "  base: &base {memory_gib: 1, peak_tflop_per_s: 2, memory_bandwidth_gb_per_s: 3}\n"
    other = "  other: &other {<<: *base, memory_gib: 2}\n"
    cluster = load(tmp_path, TEXT.replace("  mine: {", f"{base}{other}  mine: {{<<: *other, "))
    assert [t.memory_bytes >> 30 for t in cluster.device_types[:3]] == [1, 2, 24]


NAMES = st.text(min_size=1, max_size=8) | st.sampled_from(
    ["1234567e8901", "12e4", "1e5", "1.5", "0x1f", "on", "null", "~", "2024-01-01", "1:30", "=", "<<", "{a", "#", "-",
     " ", "\U0001f600", "\x7f", "a: b", "!!int", "&a", "*a", "[a]", "'", '"']
)  # fmt: skip
FIGURE = st.builds(lambda digits, power: float(f"{digits}e{power}"), st.integers(1, 9999), st.integers(-9, 15))


@given(st.data(), st.lists(NAMES, min_size=4, max_size=4, unique=True), st.sampled_from(["c.yaml", "c.json"]))
def test_whatever_is_written_is_read_again(tmp_path_factory, data, names, file):
    """Any names, and any figures of four digits in SI units: those of measured clusters."""
    figure = lambda: data.draw(FIGURE)  # noqa: E731
    kind = DeviceType(names[3], data.draw(st.integers(1, 1 << 50)), figure(), figure())
    nodes = tuple(
        Node(name, (kind.name,) * data.draw(st.integers(1, 3)), Fabric(figure(), figure())) for name in names[:2]
    )
    links = tuple(Link(name, names[2], figure(), figure()) for name in names[:2])
    cluster = Cluster((kind,), nodes, (names[2],), links)
    path = tmp_path_factory.getbasetemp() / file
    cluster_file.dump(cluster, path)
    assert cluster_file.load(path) == cluster


def test_published_devices_are_written_and_read_again(tmp_path):
    cluster = presets.cluster(dict.fromkeys(presets.DEVICE_TYPES, 1))
    cluster_file.dump(cluster, tmp_path / "c.yaml")
    assert cluster_file.load(tmp_path / "c.yaml") == cluster
    assert cluster_file.from_text("A100-40=6,V100-16=3") == presets.cluster({"A100-40": 6, "V100-16": 3})
    assert cluster_file.from_text(str(tmp_path / "c.yaml")) == cluster


@pytest.mark.parametrize("text", ['{"format": 1, "format": 1}', '{"ranks": [{"a": 1, "a": 2}]}', "[" * 100_000])
def test_json_files_are_no_laxer(tmp_path, text):
    (tmp_path / "m.json").write_text(text)
    for load_file, error in ((measurements.load, ClusterError), (plan_file.load, PlanningError)):
        with pytest.raises(error, match=r"m.json: .*(is there twice|nested too deeply)"):
            load_file(tmp_path / "m.json")


def test_no_file(tmp_path):
    with pytest.raises(ClusterError, match="cannot be read"):
        cluster_file.load(tmp_path / "none.yaml")


def test_the_schema_accepts_nothing_unknown():
    schema = cluster_file.json_schema()
    assert schema["additionalProperties"] is False and set(schema["required"]) == {"nodes"}


def test_all_shortest_paths_and_none_through_a_node():
    nodes = [Node(name, ("gpu",), FABRIC) for name in "abc"]
    links = []
    for node in "ac":
        for switch, width in (("s", 1e9), ("t", 2e9)):
            links += [Link(node, switch, width, 1e-6), Link(switch, node, width, 1e-6)]
    links += [Link("a", "b", 9e9, 0), Link("b", "c", 9e9, 0)]  # as short, but through a node
    cluster = Cluster((GPU,), tuple(nodes), ("s", "t"), tuple(links))
    assert [[links[i].destination for i in path] for path in cluster.paths(0, 2)] == [["s", "c"], ["t", "c"]]
    assert [links[i].destination for i in cluster.path(0, 2)] == ["t", "c"]
    assert cluster.paths(0, 0) == ((),)
    with pytest.raises(ClusterError, match="no path from node b to node a"):
        cluster.path(1, 0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_any_mix_of_node_sizes(sizes):
    cluster = star([GPU], [Node(f"n{i}", ("gpu",) * size, FABRIC) for i, size in enumerate(sizes)], 1e9, 1e-6)
    assert len(cluster.devices) == sum(sizes)
    assert [d.index for d in cluster.devices] == list(range(sum(sizes)))
    for a in range(len(sizes)):
        for b in range(len(sizes)):
            assert len(cluster.path(a, b)) == (0 if a == b else 2)


def test_presets_by_count():
    cluster = presets.cluster({"A100-40": 6, "V100-16": 3}, devices_per_node=4)
    assert [len(node.device_types) for node in cluster.nodes] == [4, 2, 3]
    with pytest.raises(ClusterError, match="no published device 'A1'"):
        presets.cluster({"A1": 2})


def test_the_planner_imports_neither_triton_nor_torch():
    """In a process of its own: what is imported, and that it is quick to start."""
    code = (
        "import sys, pkgutil, importlib, triton_ext.planner as p\n"
        "for module in pkgutil.walk_packages(p.__path__, 'triton_ext.planner.'):\n"
        "    importlib.import_module(module.name)\n"
        "bad = {'torch', 'triton', 'triton_ext.runtime', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "print(sorted(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
