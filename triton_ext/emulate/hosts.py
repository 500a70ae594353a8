"""Emulated hosts: namespaces with links between them, and the processes that run there."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from .. import signals
from ..errors import HostsError
from . import network, processes

_CLONE_NEWNET = 0x40000000
_MOST_HOSTS = 254
_AFTER_FAILURE_S = 10.0  # what the other hosts' commands have, to see it and end by themselves
_serials = itertools.count()


class Hosts:
    """`count` hosts on this machine, joined by a switch; use it as a context manager.

    `rate` is the speed of each host's link, of both directions, in tc's notation ("1gbit"), for all hosts or one
    for each; `mtu_bytes` is of all links. Each host sees itself as `addresses[host]` on the interface `interface`.
    At the end of the block, also by an exception, SIGINT or SIGTERM, all processes started here are ended and the
    hosts are removed; those of a process that was killed are removed when the next one starts.

    Raises HostsError without root or iproute2, and for a wrong rate, count or MTU.
    """

    interface = network.INTERFACE

    def __init__(self, count: int, rate: str | Sequence[str] = "1gbit", mtu_bytes: int = 1500) -> None:
        rates = [rate] * count if isinstance(rate, str) else list(rate)
        if not 1 <= count <= _MOST_HOSTS:
            raise HostsError(f"{count} hosts: there can be 1 to {_MOST_HOSTS}")
        if len(rates) != count:
            raise HostsError(f"{len(rates)} rates for {count} hosts: give one for all, or one for each")
        if not 68 <= mtu_bytes <= 65535:
            raise HostsError(f"an MTU of {mtu_bytes} bytes: IPv4 takes 68 to 65535")
        self.rates_bits_per_s = [network.parse_rate(text) for text in rates]
        self.mtu_bytes = mtu_bytes
        self.addresses = [network.address(host) for host in range(count)]
        self.name = network.network_name(next(_serials))
        self._started: list[subprocess.Popen[bytes]] = []
        self._signals = ExitStack()

    def __len__(self) -> int:
        return len(self.addresses)

    def __enter__(self) -> Hosts:
        network.require()
        remove_abandoned()
        self._signals.enter_context(signals.exit_on_sigterm())
        try:
            with signals.signals_deferred():
                network.create(self.name, self.rates_bits_per_s, self.mtu_bytes)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with signals.signals_deferred():
                processes.end(self._started)
                processes.end_marked(self.name)
                network.remove(self.name)
        finally:
            self._signals.close()

    def namespace(self, host: int) -> str:
        """The name of the host's namespace, as `ip netns exec` takes it."""
        return network.namespace(self.name, self._checked(host))

    def cut(self, host: int) -> None:
        """Pull the host's cable at the switch: nothing comes or goes, and nobody is told."""
        network.set_link(self.name, self._checked(host), up=False)

    def restore(self, host: int) -> None:
        """Plug the cable in again."""
        network.set_link(self.name, self._checked(host), up=True)

    def shaped_rate(self, host: int) -> int:
        """Bits per second of the host's link, as the kernel has it."""
        return network.shaped_rate(self.name, self._checked(host))

    @contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Within the block, the calling thread's network is the host's, and so is that of what it starts.

        A socket keeps the network that it was made in. Files are the machine's, /sys too.
        """
        with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{self.namespace(host)}") as there:
            _set_network(there.fileno())
            try:
                yield
            finally:
                _set_network(home.fileno())

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        cores: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, in a session of its own, on the given cores of the machine (default: all).

        `environment` is added to this process's; gloo and UCX are told to use the host's link. `options` are those
        of subprocess.Popen, which is returned.
        """
        pinned = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []
        network_environment = {
            "GLOO_SOCKET_IFNAME": self.interface,
            "UCX_TLS": "tcp,self",  # else UCX finds the peer's memory, on the same machine
            processes.MARKER: self.name,
        }
        process = subprocess.Popen(
            [*pinned, "ip", "netns", "exec", self.namespace(host), *command],
            env={**os.environ, **network_environment, **(environment or {})},
            start_new_session=True,
            **options,
        )
        self._started.append(process)
        return process

    def run(
        self,
        commands: Sequence[Sequence[str]],
        *,
        cores: Sequence[Sequence[int]] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Run one command per host, print their output with the host in front, and return their exit statuses.

        A command ended by a signal counts as 128 + its number. Once a command has failed, the others have 10 s to
        end; then they are ended, and get its status. Raises HostsError after `timeout_s` (default: no limit).
        """
        for name, given in (("commands", commands), ("sets of cores", cores)):
            if given is not None and len(given) != len(self):
                raise HostsError(f"{len(given)} {name} for {len(self)} hosts: give one for each")
        running, joins = [], []
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for host, command in enumerate(commands):
            process = self.start(
                host, command, cores=cores[host] if cores else None, environment=environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            running.append(process)
            joins.append(processes.stream(process, f"[host {host}] "))
        statuses: dict[int, int] = {}
        give_up = None
        while len(statuses) < len(self):
            time.sleep(0.02)
            for host, process in enumerate(running):
                status = process.poll()
                if status is not None:
                    statuses[host] = status if status >= 0 else 128 - status
            failed = max(statuses.values(), default=0)
            if failed and give_up is None:
                give_up = time.monotonic() + _AFTER_FAILURE_S
            if deadline is not None and time.monotonic() > deadline:
                processes.end(running)
                raise HostsError(f"the hosts' commands had not ended after {timeout_s} s, and were ended")
            if give_up is not None and time.monotonic() > give_up:
                processes.end(running)
                break
        for join in joins:
            join()
        return [statuses.get(host, failed) for host in range(len(self))]

    def _checked(self, host: int) -> int:
        if not 0 <= host < len(self):
            raise HostsError(f"host {host}: there are hosts 0 to {len(self) - 1}")
        return host


def remove_abandoned() -> None:
    """Remove the hosts, and end the processes, of processes that were killed before they could."""
    for name in network.abandoned():
        processes.end_marked(name)
        network.remove(name)


def _set_network(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise HostsError(f"cannot enter the network namespace: {os.strerror(number)}; it needs root")
