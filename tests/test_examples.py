"""Every example, run as its first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATHS = (ROOT / "examples").rglob("[0-9]*.py")
EXAMPLES = sorted(path.relative_to(ROOT / "examples").as_posix() for path in PATHS)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example, tmp_path):
    text = (ROOT / "examples" / example).read_text()
    [line] = [line.strip() for line in text.splitlines() if line.strip().endswith(f"examples/{example}")]
    program, *arguments = line.split()
    module = {"torchrun": ["-m", "torch.distributed.run", "--standalone"], "python": []}[program]
    command = [sys.executable, *module, *arguments]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=200)
    assert run.returncode == 0, run.stdout.decode() + run.stderr.decode()
    assert run.stdout.strip(), "says what it did"
