"""How GPUs' memory is got, with stand-ins for what needs GPUs: which calls are made, in which order, by which rank."""

import errno
import gc
import inspect
import mmap
import os
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.distributed import _symmetric_memory

from triton_ext.errors import PlanError
from triton_ext.runtime import memory
from triton_ext.runtime.groups import ThreadRanks
from triton_ext.runtime.transports import nvshmem, p2p

CPU = torch.device("cpu")
WORLD = 3


def on_all_ranks(function):
    """function(rank's group) on a thread each; returns what each returned or raised."""
    results = [None] * WORLD

    def play(group):
        try:
            results[group.rank] = function(group)
        except Exception as error:
            results[group.rank] = error

    threads = [threading.Thread(target=play, args=(group,)) for group in ThreadRanks.world([0] * WORLD, CPU)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


class Collective:
    """A call that all ranks make together, with the same arguments: how stand-ins notice ranks that do not."""

    def __init__(self, world=WORLD):
        self.barrier = threading.Barrier(world, timeout=20)
        self.calls = {}

    def __call__(self, rank, *arguments):
        self.calls.setdefault(rank, []).append(arguments)
        self.barrier.wait()
        assert len(set(map(tuple, self.calls.values()))) == 1, "ranks make different collective calls"
        self.barrier.wait()


@pytest.fixture
def symmetric_memory(monkeypatch):
    """torch's symmetric memory, on the CPU: `calls` of each thread, and `refuses`, the number of bytes it has not."""
    fake = SimpleNamespace(calls={}, refuses=None, tensors={}, together=Collective())
    here = threading.get_ident
    signature = inspect.signature(_symmetric_memory.rendezvous)

    def empty(*size, dtype=None, device=None):
        fake.calls.setdefault(here(), []).append("empty")
        if fake.refuses == (threading.current_thread().name, *size):
            raise RuntimeError("out of memory")
        return torch.full(size, 7, dtype=dtype, device=device)

    def rendezvous(*args, **kwargs):
        tensor, group = signature.bind(*args, **kwargs).args
        fake.calls[here()].append("rendezvous")
        fake.tensors[group] = tensor
        fake.together(group, tensor.numel())
        in_order = [fake.tensors[name] for name in sorted(fake.tensors, key=lambda name: int(name.split()[1]))]
        return SimpleNamespace(buffer_ptrs=[each.data_ptr() for each in in_order])

    monkeypatch.setattr(_symmetric_memory, "empty", empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    return fake


def test_p2p_segments_are_zeroed_and_known_to_all(symmetric_memory):
    segments = on_all_ranks(lambda group: p2p.Segments(group, 4096, CPU))
    for segment in segments:
        assert segment.addresses == [other.local.data_ptr() for other in segments]
        assert segment.local.shape == (4096,) and not segment.local.any()
    assert list(symmetric_memory.calls.values()) == [["empty", "rendezvous"]] * WORLD


def test_p2p_fails_on_all_ranks_if_one_has_no_memory(symmetric_memory):
    def allocate(group):
        threading.current_thread().name = f"rank {group.rank}"
        return p2p.Segments(group, 4096, CPU)

    symmetric_memory.refuses = ("rank 1", 4096)
    for error in on_all_ranks(allocate):
        assert isinstance(error, PlanError) and "rank 1 cannot allocate 4096 bytes" in str(error)
    assert list(symmetric_memory.calls.values()) == [["empty"]] * WORLD, "nobody waits for a rank without memory"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_p2p_without_a_gpu_says_so():
    for error in on_all_ranks(lambda group: p2p.Segments(group, 4096, torch.device("cuda"))):
        assert isinstance(error, PlanError) and "cannot allocate 4096 bytes on cuda" in str(error)


def test_mapped_memory_is_seen_by_all():
    def run(group):
        local, segments = memory._map_all(group, 4096)
        assert local is segments[group.rank] and not local.any()
        group.exchange(None)
        local[0] = 1 + group.rank
        group.exchange(None)
        return [int(segment[0]) for segment in segments]

    assert on_all_ranks(run) == [[1, 2, 3]] * WORLD


@pytest.mark.parametrize(("module", "call"), [(os, "memfd_create"), (os, "ftruncate"), (mmap, "mmap")])
def test_mapping_fails_on_all_ranks_if_one_has_no_memory(module, call, monkeypatch):
    works, name = getattr(module, call), "rank without memory"

    def fails(*arguments, **options):
        if threading.current_thread().name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return works(*arguments, **options)

    def run(group):
        if group.rank == 1:
            threading.current_thread().name = name
        memory._map_all(group, 4096)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(module, call, fails)
    errors = [f"{type(error).__name__}: {error}" for error in on_all_ranks(run)]
    assert errors == ["PlanError: rank 1 cannot allocate 4096 bytes: [Errno 28] No space left on device"] * WORLD
    gc.collect()  # the errors' frames
    assert len(os.listdir("/proc/self/fd")) == before


class Pe:
    """One processing element of a stand-in for NVSHMEM: a heap, and what was called."""

    def __init__(self, collective):
        self.collective, self.calls, self.tensors, self.heap = collective, [], {}, torch.full((1 << 16,), 7).byte()
        self.used = 0

    def init(self, device, uid, rank, nranks, initializer_method):
        assert (uid, initializer_method, device.is_current) == ("uid of 0", "uid", True)
        assert nranks == self.collective.barrier.parties
        self.rank = rank
        self.together("init")

    def together(self, *call):
        self.calls.append(call)
        self.collective(self.rank, *call)

    def tensor(self, shape, dtype):
        self.together("tensor", shape, dtype)
        start, self.used = self.used, self.used + shape[0]
        tensor = self.heap[start : self.used]
        self.tensors[tensor.data_ptr()] = start
        return tensor

    def free_tensor(self, tensor):
        self.together("free", self.tensors.pop(tensor.data_ptr()))

    def finalize(self):
        assert not self.tensors, "memory is given back before"
        self.together("finalize")


@pytest.fixture
def pes(monkeypatch, request):
    """Stand-ins for the modules nvshmem and cuda.core; PE 2 is on another host. Returns the PEs, by thread."""
    pes, collective = {}, Collective(getattr(request, "param", WORLD))

    class Gpu:
        def __init__(self, index):
            self.index, self.is_current = index, False

        def set_current(self):
            self.is_current = True

    def pe():
        return pes.setdefault(threading.get_ident(), Pe(collective))

    def ptr(address, rank):
        me = pe()
        if (me.rank == 2) != (rank == 2):
            return 0
        [peer] = (each for each in pes.values() if each.rank == rank)
        return peer.heap.data_ptr() + address - me.heap.data_ptr()

    def module(name, **contents):
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    core = module(
        "nvshmem.core",
        get_unique_id=lambda empty: "empty" if empty else "uid of 0",
        **{name: lambda *a, name=name, **k: getattr(pe(), name)(*a, **k)
           for name in ("init", "tensor", "free_tensor", "finalize")},
    )  # fmt: skip
    bindings = module("nvshmem.bindings", ptr=ptr, cumodule_init=lambda handle: pe().calls.append(("module", handle)))
    module("nvshmem", core=core, bindings=bindings)
    module("cuda", core=module("cuda.core", Device=Gpu))
    monkeypatch.setattr(nvshmem.knobs.runtime.kernel_load_end_hook, "calls", [])
    return pes


def test_nvshmem_segments_lie_at_the_same_place_of_every_heap(pes, monkeypatch):
    heaps = {}

    def heap(group, device):
        if group not in heaps:
            heaps[group] = nvshmem.Heap(group, device)
        return heaps[group]

    monkeypatch.setattr(nvshmem, "heap", heap)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: WORLD)

    def run(group):
        me = threading.get_ident()
        first, second = (nvshmem.Segments(group, nbytes, torch.device("cuda", 0)) for nbytes in (256, 512))
        pes[me].first = first.local.data_ptr() - pes[me].heap.data_ptr()
        group.exchange(None)
        return pes[me], first, second

    results = on_all_ranks(run)
    for pe, first, second in results:
        assert not first.local.any() and not second.local.any()
        assert pe.first == 0
        for address, (other, theirs, _) in zip(first.addresses, results, strict=True):
            reachable = (other.rank == 2) == (pe.rank == 2)
            assert address == (theirs.local.data_ptr() if reachable else None)
        assert second.addresses[pe.rank] == pe.heap.data_ptr() + 256
        assert [call[0] for call in pe.calls] == ["init", "tensor", "tensor"]


def test_nvshmem_refuses_a_part_of_the_ranks(pes, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: WORLD + 1)
    for error in on_all_ranks(lambda group: nvshmem.Segments(group, 256, CPU)):
        assert isinstance(error, PlanError) and "takes all ranks of the job" in str(error)


def test_nvshmem_memory_is_given_back_when_all_have_released_it(pes):
    def run(group):
        heap = nvshmem.Heap(group, torch.device("cuda", 0))
        numbers = [heap.allocate(64)[0] for _ in range(3)]
        heap.release(numbers[1])
        if group.rank != 0:
            heap.release(numbers[0])  # rank 0 still uses it
        heap.allocate(128)
        heap.close()
        return pes[threading.get_ident()].calls

    for calls in on_all_ranks(run):
        freed = [offset for name, offset in (call[:2] for call in calls if len(call) > 1) if name == "free"]
        assert freed == [64, 0, 128, 192]
        assert [call[0] for call in calls[4:6]] == ["free", "tensor"], "before the next allocation"
        assert calls[-1] == ("finalize",)


@pytest.mark.parametrize("pes", [1], indirect=True)
def test_virtual_ranks_share_the_heap_of_their_process(pes):
    first, second = (
        nvshmem.Segment(nvshmem.heap(nvshmem.Alone(), torch.device("cuda", 0)), nbytes) for nbytes in (64, 32)
    )
    [pe] = pes.values()
    assert [each.local.data_ptr() - pe.heap.data_ptr() for each in (first, second)] == [0, 64]
    del first
    third = nvshmem.Segment(nvshmem.heap(nvshmem.Alone(), torch.device("cuda", 0)), 16)
    nvshmem.close()
    nvshmem.close()  # the second time, there is nothing to leave
    assert [call[0] for call in pe.calls] == ["init", *["tensor"] * 2, "free", "tensor", *["free"] * 2, "finalize"]
    del second, third


def test_kernels_that_call_nvshmem_get_its_state_when_they_are_loaded(pes, tmp_path):
    def run(group):
        nvshmem.Heap(group, torch.device("cuda", 0))

    on_all_ranks(run)
    [hook] = nvshmem.knobs.runtime.kernel_load_end_hook.calls
    for name, metadata in {
        "plain": '{"extern_libs": [["libdevice", "a.bc"]]}',
        "sends": '{"extern_libs": [["libdevice", "a.bc"], ["nvshmem", "b.bc"]]}',
    }.items():
        (tmp_path / f"{name}.json").write_text(metadata)
        hook(41, None, name, {f"{name}.json": str(tmp_path / f"{name}.json"), f"{name}.cubin": "-"}, "hash")
    assert pes[threading.get_ident()].calls == [("module", 41)]


def test_nvshmem_that_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    for error in on_all_ranks(lambda group: nvshmem.Heap(group, CPU)):
        assert isinstance(error, PlanError) and "install nvshmem4py" in str(error)


def test_the_stand_in_has_the_signatures_of_nvshmem4py():
    core = pytest.importorskip("nvshmem.core", reason="nvshmem4py is not installed")
    from nvshmem import bindings

    inspect.signature(core.init).bind(device=None, uid=None, rank=0, nranks=1, initializer_method="uid")
    inspect.signature(core.tensor).bind((1,), dtype=torch.uint8)
    inspect.signature(core.get_unique_id).bind(empty=True)
    inspect.signature(core.free_tensor).bind(None)
    inspect.signature(core.finalize).bind()
    assert bindings.ptr.__doc__.startswith("ptr(intptr_t dest, int pe)")
    assert bindings.cumodule_init
