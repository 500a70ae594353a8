"""docs/hosts.md: what it shows is run as it is written."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from emulation import require_hosts

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "hosts.md").read_text()
SCRIPT, PYTHON = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
SHOWN = re.findall(r"\$ sudo (triton-ext .*)\n((?:\[host .*\n)+)", GUIDE)
PROGRAM = [sys.executable, "-c", "from triton_ext.cli import app; app()"]


@pytest.fixture
def run(tmp_path):
    """Runs a command in a directory of its own, with this checkout and this Python; returns what it prints."""
    require_hosts()
    (tmp_path / "all_reduce.py").write_text(SCRIPT)
    (tmp_path / "server.py").write_text("import time\ntime.sleep(60)\n")
    paths = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(command):
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | paths, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200
        )
        assert done.returncode == 0, done.stdout.decode()
        return done.stdout.decode()

    return run


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[shown[0] for shown in SHOWN])
def test_commands(run, command, output):
    printed = run([*PROGRAM, *shlex.split(command)[1:]])
    line = re.compile(r"^(\[host \d+\] rank \d+ of \d+): (\d+) ms$", re.MULTILINE)
    assert {who for who, _ in line.findall(printed)} == {who for who, _ in line.findall(output)}, printed
    times_ms = [[int(each) for _, each in line.findall(text)] for text in (printed, output)]
    assert min(times_ms[0]) > 0.9 * min(times_ms[1]), "the links are no faster than the guide says"


def test_in_python(run):
    assert re.search(r"\d", run([sys.executable, "-c", PYTHON])), "the speed of the link"


def test_the_guide_shows_commands():
    assert len(SHOWN) == 2 and "dist.all_reduce" in SCRIPT and "Hosts(2" in PYTHON
