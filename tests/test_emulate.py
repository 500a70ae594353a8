"""Emulated hosts: made, shaped, cut, and always removed."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from emulation import require_hosts
from triton_ext import signals
from triton_ext.cli import app
from triton_ext.emulate import Hosts, measure, measure_link, network, processes
from triton_ext.errors import HostsError

needs_hosts = pytest.mark.usefixtures("hosts_work")

# Makes two hosts with a process that ignores SIGTERM on the first, tells their name, and waits.
HOLDER = """
import subprocess, sys, time
from triton_ext.emulate import Hosts
with Hosts(2) as hosts:
    stubborn = "trap '' TERM; echo; sleep 300 & wait; sleep 300"
    process = hosts.start(0, ["sh", "-c", stubborn], stdout=subprocess.PIPE)
    process.stdout.readline()
    print(hosts.name, flush=True)
    if sys.argv[1:]:
        raise ValueError("an exception")
    time.sleep(60)
"""


@pytest.fixture
def hosts_work():
    require_hosts()


def of(name):
    """The network's namespaces, as `ip` lists them and as mounts."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=30).stdout
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [line.split()[0] for line in listed.splitlines() if name in line], [path for path in mounts if name in path]


def nothing_left(name):
    return of(name) == ([], []) and processes._marked(name) == []


def hold(*arguments):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, *arguments], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
    name = holder.stdout.readline().strip()
    assert name, holder.communicate(timeout=30)
    return holder, name


@needs_hosts
def test_hosts_are_made_and_removed():
    before = Path("/proc/net/dev").read_text().count(":"), os.readlink("/proc/self/ns/net")
    with Hosts(3) as hosts:
        names, mounts = of(hosts.name)
        assert len(names) == 4 and mounts
        assert {hosts.namespace(host) for host in range(3)} < set(names)
        assert not nothing_left(hosts.name)
        for host in range(3):
            ping = [sys.executable, "-c", REACH, hosts.addresses[(host + 1) % 3]]
            assert hosts.start(host, ping).wait(30) == 0
    assert nothing_left(hosts.name)
    assert before == (Path("/proc/net/dev").read_text().count(":"), os.readlink("/proc/self/ns/net"))


# Exit status 0 if the address answers: refused, since nobody listens there.
REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=3)
except ConnectionRefusedError:
    sys.exit(0)
sys.exit(1)
"""


@needs_hosts
def test_exception():
    holder, name = hold("raise")
    assert "an exception" in holder.communicate(timeout=60)[1]
    assert nothing_left(name)


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal(number):
    holder, name = hold()
    assert not nothing_left(name)
    holder.send_signal(number)
    holder.communicate(timeout=60)
    assert holder.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert nothing_left(name)


@needs_hosts
def test_killed_then_cleaned_by_the_next():
    holder, name = hold()
    holder.kill()
    holder.wait(60)  # its pipes stay open: the process that it started lives
    assert of(name)[0] and processes._marked(name)
    with Hosts(1):
        assert nothing_left(name)


@needs_hosts
def test_several_at_once():
    holder, name = hold()
    with Hosts(2) as first, Hosts(2) as second:
        assert len({name, first.name, second.name}) == 3
        assert all(len(of(each)[0]) == 3 for each in (name, first.name, second.name))
    assert nothing_left(first.name) and nothing_left(second.name)
    assert len(of(name)[0]) == 3  # its owner lives
    holder.terminate()
    holder.communicate(timeout=60)


@needs_hosts
def test_half_made_hosts_are_removed(monkeypatch):
    shape = network._shape
    shaped = []

    def fail_at_the_third(*arguments):
        shaped.append(arguments)
        return shape(*arguments) if len(shaped) < 3 else ["rate", "nonsense"]

    monkeypatch.setattr(network, "_shape", fail_at_the_third)
    hosts = Hosts(2)
    with pytest.raises(HostsError, match="nonsense"), hosts:
        pass
    assert nothing_left(hosts.name)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_signals_wait_for_a_block():
    with pytest.raises(KeyboardInterrupt):  # noqa: SIM117
        with signals.signals_deferred():
            signal.raise_signal(signal.SIGINT)
            reached = True
    assert reached


@needs_hosts
def test_each_link_has_its_rate():
    with Hosts(3, ["40mbit", "200mbit", "1gbit"]) as hosts:
        assert [hosts.shaped_rate(host) for host in range(3)] == [40_000_000, 200_000_000, 1_000_000_000]
        for source, destination, rate in ((0, 1, 40e6), (2, 0, 40e6), (2, 1, 200e6)):
            # Headers take 4.4 %. On a machine that is busy with something else, a measurement may miss what was sent or
            # count what was held back before it began: one of several has to be right.
            shares = []
            while not shares or not all(0.8 < share < 1.1 for share in shares[-1]):
                assert len(shares) < 10, (rate, shares)
                speed = measure_link(hosts, source, destination, seconds=0.5)
                assert speed.round_trip_s > 0
                shares.append([each * 8 / rate for each in (speed.one_way_bytes_per_s, speed.both_ways_bytes_per_s)])


@needs_hosts
def test_small_mtu():
    with Hosts(2, "100mbit", mtu_bytes=576) as hosts:
        with hosts.inside(1):
            server = socket.create_server((hosts.addresses[1], 0))
        with hosts.inside(0):
            client = socket.create_connection(server.getsockname(), timeout=10)
        with server, client:
            # Less 20 bytes of IP and 32 of TCP with its time stamps, or 20 without.
            assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) in (524, 536)
        assert max(measure_link(hosts, seconds=0.5).one_way_bytes_per_s * 8 / 100e6 for _ in range(3)) > 0.4


@needs_hosts
def test_a_cut_link_stops_traffic_and_comes_back():
    with Hosts(2) as hosts:
        with hosts.inside(1):
            server = socket.create_server((hosts.addresses[1], 0))
        with hosts.inside(0):
            client = socket.create_connection(server.getsockname(), timeout=10)
        accepted, _ = server.accept()
        accepted.settimeout(0.5)
        client.sendall(b"before")
        assert accepted.recv(100) == b"before"
        hosts.cut(1)
        client.sendall(b"during")
        with pytest.raises(TimeoutError):
            accepted.recv(100)
        assert hosts.start(0, [sys.executable, "-c", REACH, hosts.addresses[1]]).wait(30) == 1
        hosts.restore(1)
        accepted.settimeout(30)
        assert accepted.recv(100) == b"during"  # TCP sends it again
        assert hosts.start(0, [sys.executable, "-c", REACH, hosts.addresses[1]]).wait(30) == 0
        assert [hosts.shaped_rate(host) for host in range(2)] == [10**9] * 2
        for each in (client, accepted, server):
            each.close()


@needs_hosts
def test_measuring_a_cut_link_fails():
    with Hosts(2) as hosts:
        hosts.cut(0)
        with pytest.raises(HostsError, match="is it cut"):
            measure_link(hosts, seconds=0.1)


@pytest.mark.parametrize(
    ("listener", "connector", "message"),
    [
        ("import time; time.sleep(60)", "", r"had not begun after 0\.3 s"),
        ("import sys; sys.exit('no address')", "", "failed; is it cut.\nno address"),
        (None, "import sys; sys.exit('no way there')", "failed; is it cut.\nno way there"),
        (None, "import time; time.sleep(60)", r"had not ended after 0\.4 s"),
    ],
)
def test_a_measurement_that_fails_leaves_nothing_running(listener, connector, message, monkeypatch):
    """Stand-ins for wire.py, on no host at all."""
    started = []

    def start(host, command, **options):
        program = (connector, listener)[host]
        command = command if program is None else [sys.executable, "-c", program]
        started.append(subprocess.Popen(command, start_new_session=True, **options))
        return started[-1]

    if (listener and "sleep" in listener) or (connector and "sleep" in connector):
        monkeypatch.setattr(measure, "_MARGIN_S", 0.3)
    with pytest.raises(HostsError, match=message):
        measure_link(SimpleNamespace(addresses=["127.0.0.1"] * 2, start=start), seconds=0.05)
    assert started and all(each.poll() is not None for each in started)
    assert all(pipe.closed for each in started for pipe in (each.stdout, each.stderr))


@needs_hosts
def test_commands_leave_no_descriptor_behind(capfd):
    def held():
        return len(os.listdir("/proc/self/fd"))

    with Hosts(2) as hosts:
        before = held()
        for _ in range(3):
            assert hosts.run([["echo", "a"], ["true"]], timeout_s=60) == [0, 0]
        deadline = time.monotonic() + 5
        while held() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert held() == before
        assert len(hosts._started) <= 2


@needs_hosts
def test_run_prints_and_returns_statuses(capfd):
    show = 'echo "$GLOO_SOCKET_IFNAME $UCX_TLS $EXTRA $(taskset -cp $$ | cut -d: -f2)"; exit $0'
    core = min(os.sched_getaffinity(0))
    with Hosts(2) as hosts:
        statuses = hosts.run([["sh", "-c", show, str(status)] for status in (0, 3)], cores=[[core], [core]],
                             environment={"EXTRA": "more"}, timeout_s=60)  # fmt: skip
    assert statuses == [0, 3]
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == [f"[host {host}] eth0 tcp,self more  {core}" for host in range(2)]


@needs_hosts
def test_run_ends_what_takes_too_long():
    with Hosts(2) as hosts:
        start = time.monotonic()
        with pytest.raises(HostsError, match=r"after 0\.5 s"):
            hosts.run([["true"], ["sleep", "60"]], timeout_s=0.5)
        assert time.monotonic() - start < 20
        assert processes._marked(hosts.name) == []


@needs_hosts
def test_run_ends_the_others_after_a_failure(monkeypatch):
    monkeypatch.setattr("triton_ext.emulate.hosts._AFTER_FAILURE_S", 0.5)
    with Hosts(2) as hosts:
        assert hosts.run([["false"], ["sleep", "60"]], timeout_s=40) == [1, 1]


@needs_hosts
def test_command(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import torch.distributed as dist
        dist.init_process_group("gloo")
        objects = [None] * dist.get_world_size()
        dist.all_gather_object(objects, dist.get_rank() ** 2)
        sys.stdout.write(" ".join([str(objects), *sys.argv[1:]]) + "\\n")  # at once: ranks of a host share it
        dist.destroy_process_group()
        sys.exit(int(sys.argv[1]))
    """)
    )
    options = ["hosts", "--rate", "1gbit", "--rate", "100mbit", "--ranks-per-host", "2", "--mtu", "1400"]
    result = CliRunner().invoke(app, [*options, "--", str(script), "0", "--more"])
    assert result.exit_code == 0, result.output
    for host in range(2):
        assert result.output.count(f"[host {host}] [0, 1, 4, 9] 0 --more") == 2, result.output


@needs_hosts
def test_command_returns_the_worst_status(tmp_path, monkeypatch):
    # Host 0's launcher would wait for the other's, for minutes.
    monkeypatch.setattr("triton_ext.emulate.hosts._AFTER_FAILURE_S", 0.5)
    script = tmp_path / "script.py"
    script.write_text("import os, sys; sys.exit(7 * (os.environ['RANK'] == '1'))")
    assert CliRunner().invoke(app, ["hosts", "--", str(script)]).exit_code == 1


def test_without_root():
    uid = os.geteuid() or 65534
    # Imported first: another user need not be able to read this checkout.
    code = (
        "import os, sys; from triton_ext.emulate import Hosts\n"
        "if not os.geteuid(): os.setuid(int(sys.argv[1]))\n"
        "Hosts(2).__enter__()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(uid)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"HostsError: emulated hosts need root, to make network namespaces (this process has user id {uid})" in (
        done.stderr
    )


def test_without_iproute2(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostsError, match="need the commands ip and tc: install the package iproute2"):
        Hosts(2).__enter__()
    result = CliRunner().invoke(app, ["hosts", "--", "script.py"])
    assert result.exit_code == 1 and "error: emulated hosts need the commands ip and tc" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "0 hosts: there can be 1 to 254"),
        ((2, ["1gbit"] * 3), "3 rates for 2 hosts"),
        ((2, "1gb"), "rate '1gb': write it as a number with kbit, mbit or gbit"),
        ((2, "0mbit"), "rate '0mbit'"),
        ((2, "1gbit", 20), "an MTU of 20 bytes: IPv4 takes 68 to 65535"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(HostsError, match=message):
        Hosts(*arguments)


@pytest.mark.parametrize(("cores", "message"), [("a", "write it as numbers"), ("99999", "core 99999 is not there")])
@needs_hosts
def test_command_refuses_cores(cores, message):
    result = CliRunner().invoke(app, ["hosts", "--cores", cores, "--cores", cores, "--", "script.py"])
    assert result.exit_code == 1 and message in result.output


def test_rates():
    assert [network.parse_rate(text) for text in ("8bit", "500kbit", "2.5gbit")] == [8, 500_000, 2_500_000_000]
