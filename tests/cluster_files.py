"""Files as `triton-ext probe` writes them."""

from triton_ext.planner import cluster_file, measurements
from triton_ext.planner.measurements import CollectiveTime, Measurements, RankFigures


def write(directory, cluster, hosts=None, library_s=1.0, largest_bytes=1 << 30):
    """A cluster file, and, if the host of each rank is given, what the probe measured: a library's collectives of 4 to
    largest_bytes took library_s."""
    directory.mkdir(exist_ok=True)
    path = directory / "cluster.yaml"
    cluster_file.dump(cluster, path)
    if hosts:
        ranks = tuple(RankFigures(host, "CPU", "cpu", 1, 1 << 30, 1e10, 1e10, 1e10) for host in hosts)
        points = tuple(
            CollectiveTime(collective, nbytes, library_s, library_s, 3)
            for collective in ("all_reduce", "all_to_all")
            for nbytes in (4, largest_bytes)
        )
        measurements.dump(Measurements("gloo", ranks, (), points), measurements.path_beside(path))
    return path
