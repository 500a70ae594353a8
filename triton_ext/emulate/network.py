"""Network namespaces, the switch between them, and the shaping of their links, through `ip` and `tc`.

Everything is made inside namespaces of our own, the switch too: the machine's own network is not touched, so
neither interface names nor addresses can clash with anything.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from ..errors import HostsError

INTERFACE = "eth0"  # of every host, inside its namespace
_PREFIX = "triton-ext-"
_COMMAND_TIMEOUT_S = 30
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_BURST_S = 1e-3  # how long a link that was idle may run above its rate: see docs/hosts.md
_QUEUE_S = 10e-3
_LEAST_IPV6_MTU_BYTES = 1280
_LEAST_QUEUE_PACKETS = 32  # a slow link's queue has to hold what TCP sends at once


def parse_rate(rate: str) -> int:
    """Bits per second of tc's notation: 10mbit, 2.5gbit. Raises HostsError for anything else, and for 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.strip().lower())
    bits_per_s = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if bits_per_s < 8:
        raise HostsError(f"rate {rate!r}: write it as a number with kbit, mbit or gbit, for instance 1gbit")
    return bits_per_s


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def namespace(network: str, host: int) -> str:
    return f"{network}-host{host}"


def network_name(serial: int) -> str:
    """A name that tells whose it is: a process id alone may be taken again by another process."""
    return f"{_PREFIX}{os.getpid()}-{_start_time(os.getpid())}-{serial}"


def require() -> None:
    """Raises HostsError where hosts cannot be emulated."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise HostsError(
            f"emulated hosts need the command{'s' * (len(missing) > 1)} {' and '.join(missing)}: install the package "
            "iproute2 (Debian, Ubuntu: apt-get install iproute2)"
        )
    if os.geteuid() != 0:
        raise HostsError(
            f"emulated hosts need root, to make network namespaces (this process has user id {os.geteuid()}): "
            "run it with sudo, or as root in a container with --privileged"
        )


def create(network: str, rates_bits_per_s: list[int], mtu_bytes: int) -> None:
    """One namespace per host, and one for the switch that joins them. Both ends of each link are shaped."""
    switch = f"{network}-switch"
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge", "forward_delay", "0")
    _run("ip", "-n", switch, "link", "set", "switch", "up")
    for host, rate in enumerate(rates_bits_per_s):
        name, port = namespace(network, host), f"port{host}"
        _run("ip", "netns", "add", name)
        _run("ip", "-n", switch, "link", "add", port, "mtu", str(mtu_bytes),
             "type", "veth", "peer", "name", INTERFACE, "mtu", str(mtu_bytes), "netns", name)  # fmt: skip
        _run("ip", "-n", switch, "link", "set", port, "master", "switch")
        for space, interface in ((switch, port), (name, INTERFACE)):
            if mtu_bytes >= _LEAST_IPV6_MTU_BYTES:  # below, the kernel has no IPv6 on the link
                _run("ip", "-n", space, "link", "set", interface, "addrgenmode", "none")  # IPv4 only: no chatter
            _run("tc", "-n", space, "qdisc", "add", "dev", interface, "root", "tbf", *_shape(rate, mtu_bytes))
            _run("ip", "-n", space, "link", "set", interface, "up")
        _run("ip", "-n", name, "address", "add", f"{address(host)}/24", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", "lo", "up")


def set_link(network: str, host: int, up: bool) -> None:
    """Plug the host's cable in or out, at the switch: so the host keeps its address, its routes and its shaping."""
    _run("ip", "-n", f"{network}-switch", "link", "set", f"port{host}", "up" if up else "down")


def shaped_rate(network: str, host: int) -> int:
    """Bits per second, as the kernel has it."""
    shown = _run("tc", "-n", namespace(network, host), "-j", "qdisc", "show", "dev", INTERFACE)
    return int(json.loads(shown)[0]["options"]["rate"]) * 8


def remove(network: str) -> None:
    """Remove a network's namespaces, and with them all that is inside. It may be there in part, or not at all."""
    for name in existing():
        if name.startswith(f"{network}-"):
            _run("ip", "netns", "delete", name, missing_ok=True)


def existing() -> list[str]:
    """Names of all namespaces that this package made, in any process."""
    directory = Path("/run/netns")
    return sorted(path.name for path in directory.glob(f"{_PREFIX}*")) if directory.is_dir() else []


def abandoned() -> list[str]:
    """Networks whose process has ended without removing them."""
    networks = {name.rpartition("-")[0] for name in existing()}
    return sorted(network for network in networks if not _owner_lives(network))


def _owner_lives(network: str) -> bool:
    match = re.fullmatch(rf"{_PREFIX}(\d+)-(\d+)-\d+", network)
    return match is not None and _start_time(int(match[1])) == int(match[2])


def _start_time(pid: int) -> int | None:
    """When the process began, in the kernel's ticks; None if it is not there, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _shape(rate_bits_per_s: int, mtu_bytes: int) -> list[str]:
    bytes_per_s = rate_bits_per_s / 8
    packet_bytes = mtu_bytes + 18  # with its Ethernet header
    burst = max(round(bytes_per_s * _BURST_S), 2 * packet_bytes)
    queue = max(round(bytes_per_s * _QUEUE_S), _LEAST_QUEUE_PACKETS * packet_bytes)
    return ["rate", f"{rate_bits_per_s}bit", "burst", str(burst), "limit", str(burst + queue)]


def _run(*command: str, missing_ok: bool = False) -> str:
    # In a session of its own: a Ctrl-C at the terminal is for us, and must not stop a removal half-way.
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise HostsError(f"`{' '.join(command)}` did not end in {_COMMAND_TIMEOUT_S} s; try it by hand") from None
    if done.returncode and not (missing_ok and "No such file" in done.stderr):
        advice = ""
        if "not permitted" in done.stderr or "Permission denied" in done.stderr:
            advice = "; in a container, start it with --privileged (network namespaces need CAP_SYS_ADMIN)"
        raise HostsError(f"`{' '.join(command)}` failed: {done.stderr.strip()}{advice}")
    return done.stdout
