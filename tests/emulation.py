"""Whether this machine can emulate hosts, for the tests that need it."""

import functools
import subprocess

import pytest

from triton_ext.emulate import Hosts
from triton_ext.errors import HostsError


@functools.cache
def _why_not():
    try:
        with Hosts(1) as hosts:
            subprocess.run(["ip", "netns", "exec", hosts.namespace(0), "true"], check=True, timeout=30)
    except (HostsError, subprocess.SubprocessError) as error:
        return str(error)
    return None


def require_hosts():
    if reason := _why_not():
        pytest.skip(f"no emulated hosts: {reason}")
