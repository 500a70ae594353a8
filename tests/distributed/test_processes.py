"""What happens to plans where a process forks, and where it ends."""

import atexit
import os
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch

import triton_ext as tx
from collectives import assert_close, inputs, launch, make_plan, reference
from distributed import harness

COLLECTIVES = ["all_to_all", "all_reduce"]
SHAPE = (32, 24)


def _run(plans, rank, seed):
    tensors = inputs(2, SHAPE, torch.float32, seed)
    for name, plan in plans.items():
        assert_close(launch(plan, tensors[rank]), reference(name, tensors, rank).float())


def _child(plans, sockets):
    """All that a forked child could do with its parent's plans, to the end of its interpreter."""
    for plan in plans.values():
        with pytest.raises(tx.errors.PlanError, match="of the process that this one was forked from"):
            _ = plan.result
        with pytest.raises(tx.errors.PlanError, match="forked from: it did nothing"):
            launch(plan, torch.ones(SHAPE))
        plan.free()
    assert all(each.fileno() == -1 for each in sockets), "peers could not see the parent end"
    plans.clear()
    tx.shutdown()
    atexit._run_exitfuncs()


def _forks(rank, tell, hosts):
    os.environ["TRITON_EXT_HOST"] = str(rank % hosts)
    plans = {name: make_plan(name, SHAPE, torch.float32, rank, 2) for name in COLLECTIVES}
    _run(plans, rank, 0)
    traffics = [plan._state.traffic for plan in plans.values()]
    sockets = [each.socket for traffic in traffics if traffic for each in traffic.connections.values()]
    assert len(sockets) == (len(plans) if hosts > 1 else 0)
    if rank == 0 and (pid := os.fork()) == 0:
        status = 1
        try:
            _child(plans, sockets)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    for seed in range(1, 20):
        _run(plans, rank, seed)
        time.sleep(0.01)
    if rank == 0:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    _run(plans, rank, 20)
    return True


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_forked_child_leaves_the_plans_of_its_parent_alone(hosts, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert harness.run(2, _forks, hosts) == [True] * 2


def _ends(rank, tell):
    os.environ["TRITON_EXT_HOST"] = str(rank)
    plans = {name: make_plan(name, SHAPE, torch.float32, rank, 2) for name in COLLECTIVES}
    _run(plans, rank, 0)
    before = {thread.name for thread in threading.enumerate()}
    assert {"triton_ext watch", "triton_ext proxy"} <= before
    atexit._run_exitfuncs()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("triton_ext")]


def test_no_thread_is_left_when_the_interpreter_ends(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert harness.run(2, _ends) == [[], []]


def test_a_script_that_ends_without_a_word(tmp_path):
    """No shutdown(), no destroy_process_group(), and a store that the other rank still holds."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, sys
            sys.path.insert(0, {str(Path(__file__).parents[1])!r})
            rank = int(sys.argv[1])
            os.environ["TRITON_EXT_HOST"] = str(rank)
            import torch, torch.distributed as dist
            import triton_ext as tx
            from collectives import launch
            store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            plan = tx.all_reduce((64, 32), torch.float32)
            for _ in range(3):
                launch(plan, torch.ones(64, 32))
            print(plan.result.sum().item())
            """
        )
    )
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(store.port)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            text = rank.communicate(timeout=120)[0]
            assert rank.returncode == 0, text
            assert "4096.0" in text and "terminate" not in text, text
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
