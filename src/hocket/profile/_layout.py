"""The form of a rank's record on disk: one file that its rank maps, and that anybody may read at any moment.

The file is memory that the kernel keeps: what a rank had written is there after `kill -9`. It holds a head with what
the rank does now, the Python stack of its main thread, the groups, a table of texts, and two rings of rows of 64
bytes: operations with their waits, and everything that is rarer. A row carries its number, so that a reader knows
which rows of a ring hold and in which order.
"""

import struct
from typing import Final

import numpy as np

MAGIC: Final = b"HOCKREC3"
HEAD: Final = struct.Struct("<8sIIIIQddII")
"""Magic, rank, world, process number, host's number of texts, start of the process in clock ticks, seconds from
perf_counter to the epoch, perf_counter at the beginning, rows of both rings."""

RUN_AT: Final = 64  # 16 bytes that all ranks of a run share and no other has; 0 where they have not agreed on any
RUN_NBYTES: Final = 16

# Offsets of what changes, each a word of its own.
ROWS_AT: Final = (128, 136)  # u64: rows written to either ring
TEXTS_AT: Final = 144  # u64: bytes of texts
GROUPS_AT: Final = 152  # u64
ALIVE_AT: Final = 160  # f64 perf_counter: when the rank's watcher last ran
ENDED_AT: Final = 168  # f64 perf_counter: when the program ended; 0 before
STEP_AT: Final = 176  # u64: steps made
PHASE_AT: Final = 184  # u64: 1 + text of the phase that the main thread is in; 0 for none
QUIET_AT: Final = 192  # u64: 1 while somebody asks for a dump of the stacks that need not be shown
MESSAGE_AT: Final = 200  # f64 since (0: no wait), i64 peer or -1, u64 bytes, u64 whether it receives
MESSAGE: Final = struct.Struct("<dqQQ")
BUSY_AT: Final = 240  # f64: share of the last second in which the main thread had a core
PATIENCE_AT: Final = 248  # f64: the longest wait that ended well so far, seconds
MEMORY_AT: Final = 256  # u64: resident bytes when the watcher last ran
STEP_S_AT: Final = 264  # f64: how long the last step took

STACK_AT: Final = 4096
STACK_NBYTES: Final = 8192
STACK: Final = struct.Struct("<dI")  # perf_counter, bytes; then the text

GROUPS_FROM: Final = STACK_AT + STACK_NBYTES
GROUPS: Final = 256
GROUP: Final = np.dtype(
    [("name", "<u4"), ("members", "<u4"), ("kind", "<u4"), ("size", "<u4"), ("started", "<u8"), ("finished", "<u8"),
     ("nbytes", "<u8"), ("started_s", "<f8"), ("unused", "<u8", 2)]
)  # fmt: skip
GROUP_NAMES: Final = struct.Struct("<II")
GROUP_NOW: Final = struct.Struct("<IIQQQd")  # from `kind` on
GROUP_NOW_AT: Final = 8

TEXTS_FROM: Final = GROUPS_FROM + GROUPS * GROUP.itemsize
TEXTS_NBYTES: Final = 1 << 18
RINGS_FROM: Final = TEXTS_FROM + TEXTS_NBYTES
RING_ROWS: Final = (1 << 16, 1 << 15)

ROW: Final = struct.Struct("<IBBHIIQddddd")
ROW_TYPE: Final = np.dtype(
    [("number", "<u4"), ("type", "u1"), ("flags", "u1"), ("group", "<u2"), ("text", "<u4"), ("seq", "<u4"),
     ("nbytes", "<u8"), ("posted_s", "<f8"), ("started_s", "<f8"), ("published_s", "<f8"), ("arrived_s", "<f8"),
     ("finished_s", "<f8")]
)  # fmt: skip
assert ROW.size == ROW_TYPE.itemsize == 64
assert GROUP.itemsize == 64

OPERATION, WAIT, STEP, PHASE, GARBAGE, SAMPLE, ERROR, LINK, VALUE = range(1, 10)
"""Types of rows. The caller of an operation whose flags hold INLINE was blocked from when it posted it to its end, and
no row of type WAIT says that again; its readers get one. What a SAMPLE's five numbers are: when; CPU seconds of the
process, of the main thread; seconds that the main thread was ready and had no core; MHz of its core, or 0. Its bytes
are the resident memory, its text is where the main thread was, 0 if that was not read then. A LINK's text are its own
and the peer's address, its bytes and `seq` are the bytes and segments sent again since the first connection, its
numbers: when; seconds in use (`_links.ConnectionUse`); round trip, the shortest round trip, 0. A VALUE is a number that
the program tells of a step (`seq`): its text is the name, its numbers: when; the value."""
INLINE: Final = 2
"""Of an operation's flags, beside 1 if it was asynchronous. Those of a wait are 1 if it was for a message."""
POINTS: Final = (SAMPLE, LINK, VALUE)
"""Types of rows of whose numbers only the first is a time."""

FILE: Final = "rank-{:05d}.record"
STACKS: Final = "rank-{:05d}.stacks"
FOLDER: Final = "record"


def file_nbytes() -> int:
    return RINGS_FROM + sum(RING_ROWS) * ROW.size


def ring_at(ring: int) -> int:
    """Return where a ring begins."""
    return RINGS_FROM + (RING_ROWS[0] * ROW.size if ring else 0)
