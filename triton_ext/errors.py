"""The errors a user of the package can meet. Each message says what happened, with the numbers, and what to do."""


class TritonExtError(Exception):
    """Base of every error raised by this package."""


class CompileError(TritonExtError):
    """A kernel that cannot be compiled: names the operation or rule, and the author's line."""


class PlanError(TritonExtError):
    """A plan that cannot be made or used: ranks disagree, wrong device, used after free, failed before."""


class JobError(TritonExtError):
    """A job that cannot be joined as asked: a setting that cannot be, or that its ranks disagree on."""


class CollectiveTimeout(TritonExtError):
    """A wait inside a kernel that ended without its peer: names rank, program, peer, epoch, expected and seen."""


class PeerLost(CollectiveTimeout):
    """A peer process ended while this rank still needed it."""


class LaunchError(TritonExtError):
    """A kernel that cannot be launched as asked, or whose device_assert failed."""


class SimulationError(TritonExtError):
    """The simulator found a fault in a kernel's communication, or cannot run it: names the seed and the line."""


class MemoryAccessError(TritonExtError):
    """A checked kernel (TRITON_EXT_SANITIZE=1) left the memory of its tensors, or read what nobody has written."""


class HostsError(TritonExtError):
    """Emulated hosts that cannot be made or used: no root, a tool is missing, a command did not end in time."""


class TraceError(TritonExtError):
    """Recorded files that cannot be read: none, a broken one, or of different jobs."""


class ClusterError(TritonExtError):
    """A description of a cluster that cannot be: names the file, the field and its value."""


class PlanningError(TritonExtError):
    """Something that the planner cannot plan for: names the job, profile, setting or field, with its value."""


class ProbeError(TritonExtError):
    """A group that cannot be measured: it was not started by torchrun, or a rank did not answer."""
