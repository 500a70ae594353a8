"""What a link between two emulated hosts really carries: the time on the wire, in tables, is bytes by this rate."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import HostsError
from . import processes, wire
from .hosts import Hosts

_MARGIN_S = 30.0  # to start, and for the waits of the program to end


@dataclass(frozen=True)
class LinkSpeed:
    """Payload that TCP carries between two hosts, in bytes per second, and a small message's way there and back."""

    one_way_bytes_per_s: float
    both_ways_bytes_per_s: float  #: of each direction, while both are in use: the slower one's
    round_trip_s: float


def measure_link(hosts: Hosts, source: int = 0, destination: int = 1, seconds: float = 1.0) -> LinkSpeed:
    """Measure between two hosts for `seconds` one way, and for `seconds` both ways at once.

    Raises HostsError if a host does not reach the other, or a measurement does not end.
    """
    address = hosts.addresses[destination]
    with _program(hosts, destination, "listen", address, str(seconds)) as listener:
        port = _port(listener)
        with _program(hosts, source, "connect", address, port, str(seconds)) as connector:
            sent, received = (_result(process, 2 * seconds + _MARGIN_S) for process in (connector, listener))
    return LinkSpeed(received["one_way"], min(sent["both_ways"], received["both_ways"]), sent["round_trip"])


@contextmanager
def _program(hosts: Hosts, host: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """wire.py on a host; it ends with the block at the latest."""
    command = [sys.executable, "-I", wire.__file__, *arguments]
    with hosts.start(host, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            processes.end([process])


def _port(listener: subprocess.Popen[bytes]) -> str:
    """The first line that a listener prints."""
    assert listener.stdout is not None
    if not select.select([listener.stdout], [], [], _MARGIN_S)[0]:
        raise HostsError(f"the measurement of a link had not begun after {_MARGIN_S:g} s")
    first = listener.stdout.readline()
    if not first:
        _result(listener, _MARGIN_S)
    return str(json.loads(first)["port"])


def _result(process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, float]:
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise HostsError(f"the measurement of a link had not ended after {timeout_s:g} s: is it cut?") from None
    if process.returncode:
        raise HostsError(f"the measurement of a link failed; is it cut?\n{errors.decode(errors='replace').strip()}")
    return json.loads(output)
