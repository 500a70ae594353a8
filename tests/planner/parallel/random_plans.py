"""Random clusters, profiles and plans for tests of simulator and cost model, and small ones made by hand."""

import itertools
import random
from dataclasses import replace

from triton_ext.planner.cluster import Cluster, DeviceType, Fabric, Node, star
from triton_ext.planner.parallel.plan import ParallelPlan, Replica, Settings, Stage
from triton_ext.planner.parallel.profiles import Model, Point, Profiles

MIB = 1 << 20


def uniform(layers=8, devices=4, layer_ms=3.0, activation_bytes=0, parameter_bytes=0, optimizer_ms=0.0, net=10e9):
    """A cluster of one-device nodes and profiles of equal layers, whose forward is a third of layer_ms."""
    kind = DeviceType("gpu", 16 << 30, 1e14, 1e12)
    nodes = [Node(f"n{i}", ("gpu",), Fabric(100e9, 0.0)) for i in range(devices)]
    model = Model("uniform", (parameter_bytes,) * layers, (activation_bytes,) * layers)
    points = {
        ("gpu", 1, samples): Point(
            (layer_ms * samples,) * layers,
            (4 * parameter_bytes + 100 * MIB * samples,) * layers,
            layer_ms * samples * layers,
            optimizer_ms,
            activation_memory_bytes=(100 * MIB * samples,) * layers,
        )
        for samples in (1, 2, 4)
    }
    return star([kind], nodes, net, 0.0), Profiles(model, points)


def pipeline(stages, microbatches, layers=8, schedule="1f1b", settings=None, dp=1):
    """Equal stages of dp devices each, in order, one sample for each replica."""
    size = layers // stages
    return ParallelPlan(
        tuple(
            Stage(s * size, (s + 1) * size, tuple(Replica((s * dp + r,), 1) for r in range(dp))) for s in range(stages)
        ),
        microbatches,
        microbatches * dp,
        schedule,
        settings or Settings(),
    )


def random_case(
    seed, schedule="1f1b", microbatches=(1, 2, 3, 4, 6, 8, 12, 16, 32, 48), most_stages=6, devices_in_order=True
):
    """A cluster of up to three device types with fast or slow links, a model of even or uneven layers, and a plan:
    stages of any number of devices, mixed ones too, with samples in proportion to speed."""
    rng = random.Random(seed)
    types = [DeviceType(f"t{i}", 16 << 30, 1e14, 1e12) for i in range(rng.randint(1, 3))]
    speed = {kind.name: rng.uniform(0.3, 1) for kind in types}
    nodes, widths = [], {}
    net = 10 ** rng.uniform(9, 10.7)
    for kind in types:
        for number in range(rng.randint(1, 3)):
            fabric = Fabric(10 ** rng.uniform(10, 11.5), 3e-6)
            node = Node(f"{kind.name}.{number}", (kind.name,) * rng.choice([1, 2, 3, 4, 4]), fabric)
            nodes.append(node)
            widths[node.name] = net * rng.choice([1, 1, 0.5])
    cluster = star(types, nodes, widths, 10e-6)
    order = list(range(len(cluster.devices)))
    if not devices_in_order:
        rng.shuffle(order)
    layers = rng.randint(6, 24)
    count = rng.randint(1, min(len(order), layers // 2, most_stages))
    cuts = [0, *sorted(rng.sample(range(1, layers), count - 1)), layers]
    groups = [0, *sorted(rng.sample(range(1, len(order)), count - 1)), len(order)]
    stages, wanted = [], set()
    parts = [_replicas(rng, cluster, order[a:b]) for a, b in itertools.pairwise(groups)]
    samples = int(max(len(part) for part in parts) * rng.choice([1, 1.5, 2, 3]))
    for begin, end, part in zip(cuts[:-1], cuts[1:], parts, strict=True):
        replicas = _shared(cluster, speed, part, samples)
        stages.append(Stage(begin, end, replicas))
        wanted |= {(cluster.devices[r.devices[0]].type, r.tp, r.samples) for r in replicas}
    batches = rng.choice(microbatches)
    plan = ParallelPlan(tuple(stages), batches, batches * samples, schedule)
    return cluster, _profiles(rng, layers, wanted, speed), plan


def _replicas(rng, cluster, devices):
    def fits(tp):
        parts = [devices[i : i + tp] for i in range(0, len(devices), tp)]
        return all(len(part) == tp and len({cluster.devices[d].node for d in part}) == 1 for part in parts)

    tp = rng.choice([tp for tp in (1, 2, 4) if fits(tp)])
    return [tuple(devices[i : i + tp]) for i in range(0, len(devices), tp)]


def _shared(cluster, speed, parts, samples):
    rates = [speed[cluster.devices[part[0]].type] for part in parts]
    shares = [1] * len(parts)
    for _ in range(samples - len(parts)):
        shares[min(range(len(parts)), key=lambda i: (shares[i] + 1) / rates[i])] += 1
    return tuple(Replica(part, share) for part, share in zip(parts, shares, strict=True))


def _profiles(rng, layers, keys, speed):
    weights = [rng.uniform(0.5, 1.5) if rng.random() < 0.5 else 1 for _ in range(layers)]
    parameters = tuple(int(rng.uniform(1e6, 1e8)) for _ in range(layers))
    model = Model("random", parameters, (int(rng.uniform(1e6, 1e7)),) * layers)
    base_ms = 10 ** rng.uniform(0, 1.5)
    points = {}
    for kind, tp, samples in sorted(keys):
        times = tuple(weight * base_ms * (samples + 0.3) / speed[kind] / tp**0.9 for weight in weights)
        activations = tuple(int(3e7 * samples / tp) for _ in parameters)
        points[kind, tp, samples] = Point(
            times,
            tuple(4 * size // tp + kept for size, kept in zip(parameters, activations, strict=True)),
            sum(times),
            sum(parameters) / tp / 1e8,
            activation_memory_bytes=activations,
        )
    return Profiles(model, points)


def with_links(cluster, factor):
    """The same cluster with every link and fabric so many times as wide."""

    links = tuple(replace(x, bandwidth_bytes_per_s=x.bandwidth_bytes_per_s * factor) for x in cluster.links)
    nodes = tuple(
        replace(x, fabric=replace(x.fabric, bandwidth_bytes_per_s=x.fabric.bandwidth_bytes_per_s * factor))
        for x in cluster.nodes
    )
    return Cluster(cluster.device_types, nodes, cluster.switches, links)
