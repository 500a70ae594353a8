"""Layout of a plan's table: the contract between the code that the passes insert and the runtime that fills it.

A table is an array of 64-bit words in the memory of its rank. The head is written once, when the plan is made; the
state changes during kernels; then comes one row per peer. Addresses are in bytes, strides and counts in elements.
All counters are monotone: nothing is zeroed between runs, and comparisons are signed differences.

Arrivals count *elements*, so ranks may run different block shapes, and several stores may fill one tensor.
"""

MAX_DIMS = 3

# Head
RANK = 0
WORLD = 1
SHAPE = 2  # MAX_DIMS words: the logical shape of the tensor that this rank's kernel computes
SHARD = 5  # indices per owner along the split dimension: the owner of index i is i // SHARD
DESTINATION_BEGIN = 6  # collectives that are not split send to ranks DESTINATION_BEGIN to DESTINATION_END - 1
DESTINATION_END = 7
CLOCK = 8  # address of a word that counts milliseconds
TIMEOUT_MS = 9
BELL = 10  # address of a word that programs make non-zero when they have completed a slice that the host is to send

# State, a cache line for each word that many programs write
EPOCH = 16  # runs that are complete
BASE = 17  # programs of all complete runs: what TICKETS and DONE were when this run began
TICKETS = 24  # programs that have started
DONE = 32  # programs that have finished
STATUS = 40  # 0, or the code of the first failure
REPORT = 41  # of that failure: program, peer, epoch, expected, seen

# Rows, one per peer
PEERS = 48
PEER_WORDS = 24
RESULT = 0  # address that the logical index 0 has, or would have, in the peer's result
RESULT_STRIDE = 1  # MAX_DIMS words
STAGE = 4  # address of logical index 0 in the area of the peer where this rank's partial values go
STAGE_STRIDE = 5  # MAX_DIMS words
READY = 8  # address of this rank's word at the peer: runs that this rank has begun
ARRIVED = 9  # address of this rank's counter at the peer: elements stored, ever
REDUCED = 10  # same for elements that this rank has reduced and stored at the peer (all_reduce)
READY_HERE = 11  # addresses of the peer's three words here
ARRIVED_HERE = 12
REDUCED_HERE = 13
EXPECTED = 14  # elements that arrive from the peer in one run
EXPECTED_REDUCED = 15
STAGE_HERE = 16  # address of logical index 0 in the area here where the peer's partial values arrive
STAGE_HERE_STRIDE = 17  # MAX_DIMS words

# Transfers, one per peer behind the rows, in tables of plans with peers that only NVSHMEM reaches. What goes to such a
# peer is stored in an outbox here, in the order of its slices. "There": this rank's own address of an object, which
# with the peer's processing element names the peer's.
TRANSFER_WORDS = 24
PE = 0  # the peer's processing element; -1 for a peer that stores reach, which has no other words
READY_THERE = 1  # this rank's word at the peer
OF_RESULT = 2  # the transfer of what goes to the peer's result
OF_STAGE = 13  # the transfer of partial values for the peer
# Words of a transfer
OUTBOX = 0  # address of the first element
THERE = 1  # where the first element goes
SIGNAL_THERE = 2  # this rank's counter at the peer: ARRIVED, or REDUCED for what was reduced
SLICE_COUNTERS = 3  # address of a word per slice, here: elements of the slice that are in the outbox, ever
ELEMENTS = 4  # in one run
SLICE = 5  # indices per slice along the slice dimension, from the first index that goes to the peer
SLICE_ELEMENTS = 6
RUN = 7  # elements that are contiguous there; divides SLICE_ELEMENTS
RUNS = 8  # runs that are RUN_BYTES apart there; groups of so many runs are GROUP_BYTES apart
RUN_BYTES = 9
GROUP_BYTES = 10

# Codes of STATUS
FAILED_READY = 1  # a peer did not begin this run
FAILED_ARRIVAL = 2  # values of a peer did not arrive
FAILED_REDUCED = 3  # reduced values of a peer did not arrive
FAILED_GRID = 4  # the grid has fewer programs than the tensor has tiles
FAILED_TILE = 5  # a program stored another tile of a reduction than its own
FAILED_HOST = 6  # the host gave up: a peer's process ended


def table_words(world: int, has_transfers: bool = False) -> int:
    """Length of the table of a plan over `world` ranks, in 64-bit words."""
    return PEERS + world * (PEER_WORDS + (TRANSFER_WORDS if has_transfers else 0))
