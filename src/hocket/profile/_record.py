"""What a rank does, written to its record as it happens: a microsecond a row, and nothing is ever waited for."""

import contextlib
import itertools
import json
import mmap
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hocket._sweep import start_ticks
from hocket.comm import OperationRecord, known_group

from . import _layout as lay
from ._live import boot_of_this_host, pid_namespace

_GROUP_NBYTES, _ROW_NBYTES, _RING = lay.GROUP.itemsize, lay.ROW.size, lay.RING_ROWS[0]
_GROUP_WORDS = _GROUP_NBYTES // 8
_STARTED_WORD, _FINISHED_WORD, _STARTED_S_WORD = (
    (lay.GROUPS_FROM + lay.GROUP.fields[name][1]) // 8  # type: ignore[index]
    for name in ("started", "finished", "started_s")
)
_pack_row, _pack_group = lay.ROW.pack_into, lay.GROUP_NOW.pack_into
_EVENTS_FROM, _EVENTS, _EVENTS_WORD = lay.ring_at(1), lay.RING_ROWS[1], lay.ROWS_AT[1] // 8
_ROWS_WORD, _STEP_WORD, _PATIENCE_WORD = lay.ROWS_AT[0] // 8, lay.STEP_AT // 8, lay.PATIENCE_AT // 8


class RankRecord:
    """Writes one rank's record; an Observer and the ProgressObserver of `hocket.comm`.

    Args:
        folder: Where the records of all ranks are.
        rank: Number of this rank in the world.
        world: Number of ranks.

    Raises:
        OSError: the file cannot be made, or the disk has no space for it.
    """

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.rank = rank
        self.pid = os.getpid()
        self.path = folder / lay.FILE.format(rank)
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{self.path.name}.{self.pid}"
        try:
            with part.open("wb+") as file:
                # A hole in the file would be a bus error when the disk is full.
                os.posix_fallocate(file.fileno(), 0, lay.file_nbytes())
                self._map = mmap.mmap(file.fileno(), lay.file_nbytes())
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._words = memoryview(self._map)[: lay.RINGS_FROM].cast("Q")
        self._seconds = memoryview(self._map)[: lay.RINGS_FROM].cast("d")
        self._counts = (itertools.count(1), itertools.count(1))
        self._texts: dict[Any, int] = {}
        self._whats: dict[tuple[str, str, str, str | None], int] = {}
        self._text_end = 0
        self._groups: dict[str, int] = {}
        self._begun: dict[int, int] = {}
        self.patience_s = 0.0  # the longest wait since the first step that has ended well
        self._lock = threading.Lock()
        now_s = time.perf_counter()
        lay.HEAD.pack_into(
            self._map, 0, lay.MAGIC, rank, world, self.pid, 0, start_ticks(self.pid) or 0, time.time() - now_s, now_s,
            *lay.RING_ROWS,
        )  # fmt: skip
        self._seconds[lay.ALIVE_AT // 8] = now_s
        self.text(
            {
                "host": os.environ.get("HOCKET_HOST") or socket.gethostname(),
                "boot": boot_of_this_host(),
                "pids": pid_namespace(),
                "argv": [word[:500] for word in sys.argv[:60]],
                "cores": sorted(os.sched_getaffinity(0)),
                "main_thread": threading.main_thread().native_id,
            }
        )
        os.replace(part, self.path)

    def of_run(self, name: bytes) -> None:
        """Say of which run this record is; the first name counts."""
        if len(name) == lay.RUN_NBYTES and not any(self._map[lay.RUN_AT : lay.RUN_AT + lay.RUN_NBYTES]):
            self._map[lay.RUN_AT : lay.RUN_AT + lay.RUN_NBYTES] = name

    # --- texts and rows ---------------------------------------------------------------------------------------------

    def text(self, value: Any) -> int:
        """Return the number of a text (any JSON value) from 1, written the first time; 0: it has no space."""
        key = value if isinstance(value, str | tuple) else json.dumps(value)
        found = self._texts.get(key)
        if found is not None:
            return found
        raw = json.dumps(value).encode()
        if len(raw) > 65_000:
            return 0
        with self._lock:
            if key in self._texts:
                return self._texts[key]
            end = self._text_end + 2 + len(raw)
            if end > lay.TEXTS_NBYTES:
                return 0
            at = lay.TEXTS_FROM + self._text_end
            self._map[at : at + 2 + len(raw)] = len(raw).to_bytes(2, "little") + raw
            self._text_end = self._words[lay.TEXTS_AT // 8] = end
            self._texts[key] = len(self._texts) + 1
            return self._texts[key]

    def row(
        self, ring: int, kind: int, *, text: int = 0, seq: int = 0, nbytes: int = 0, flags: int = 0, group: int = 0,
        times: tuple[float, float, float, float, float],
    ) -> None:  # fmt: skip
        number = next(self._counts[ring])  # one step of the interpreter: threads need no lock
        at = lay.ring_at(ring) + (number - 1) % lay.RING_ROWS[ring] * lay.ROW.size
        lay.ROW.pack_into(
            self._map, at, number & 0xFFFFFFFF, kind, flags, group, text, seq & 0xFFFFFFFF, nbytes, *times
        )
        self._words[lay.ROWS_AT[ring] // 8] = number

    def span(self, kind: int, begin_s: float, end_s: float, name: str = "", *, seq: int = 0) -> None:
        """Append something rare that took from `begin_s` to `end_s`."""
        text = (self._texts.get(name) or self.text(name)) if name else 0
        number = next(self._counts[1])
        _pack_row(
            self._map, _EVENTS_FROM + (number - 1) % _EVENTS * _ROW_NBYTES, number & 0xFFFFFFFF, kind, 0, 0, text,
            seq & 0xFFFFFFFF, 0, begin_s, begin_s, begin_s, begin_s, end_s,
        )  # fmt: skip
        self._words[_EVENTS_WORD] = number

    # --- operations -------------------------------------------------------------------------------------------------

    def _group(self, op: OperationRecord, *, begins: bool = False) -> int:
        slot = self._groups.get(op.group)
        # A second life of torch.distributed counts its operations anew.
        if slot is None or (begins and op.seq <= self._begun[slot]):
            with self._lock:
                slot = self._groups[op.group] = min(len(self._begun), lay.GROUPS - 1)
                self._begun[slot] = 0
            name, ranks = known_group(op.group)
            at = lay.GROUPS_FROM + slot * lay.GROUP.itemsize
            lay.GROUP_NAMES.pack_into(self._map, at, self.text(name), self.text([name, *ranks]))
            self._words[lay.GROUPS_AT // 8] = len(self._begun)
        return slot

    def _what(self, what: tuple[str, str, str, str | None]) -> int:
        number = self._whats[what] = self.text((*what[:3], what[3] or ""))
        return number

    def operation_started(self, op: OperationRecord) -> None:
        seq, slot = op.seq, self._groups.get(op.group)
        if slot is None or seq <= self._begun[slot]:
            slot = self._group(op, begins=True)
        finished, self._begun[slot] = self._begun[slot], seq
        _pack_group(
            self._map, lay.GROUPS_FROM + lay.GROUP_NOW_AT + slot * _GROUP_NBYTES,
            self._texts.get(op.kind) or self.text(op.kind), op.world, seq, finished if finished < seq else seq - 1,
            op.nbytes, op.started_s,
        )  # fmt: skip

    # The two that follow, and `span`, spell out what `row` does, since a step of training calls them a hundred times.

    def operation_finished(self, op: OperationRecord) -> None:
        path = op.path
        if path == "message":
            return  # its wait says all
        slot = self._groups.get(op.group)
        if slot is None:
            slot = self._group(op)
        words, seq, inline = self._words, op.seq, op.inline
        words[_FINISHED_WORD + slot * _GROUP_WORDS] = seq
        what = (op.kind, path, op.dtype, op.label)
        number = next(self._counts[0])
        _pack_row(
            self._map, lay.RINGS_FROM + (number - 1) % _RING * _ROW_NBYTES, number & 0xFFFFFFFF, lay.OPERATION,
            op.asynchronous + lay.INLINE * inline, slot, self._whats.get(what) or self._what(what), seq & 0xFFFFFFFF,
            op.nbytes, op.posted_s, op.started_s, op.published_s, op.arrived_s, op.finished_s,
        )  # fmt: skip
        words[_ROWS_WORD] = number
        if inline and op.finished_s - op.posted_s > self.patience_s:
            self._outwait(op.finished_s - op.posted_s)

    def _outwait(self, seconds: float) -> None:
        # Before the first step ranks wait for imports and compilation, which tells nothing of what comes after.
        if self._words[_STEP_WORD]:
            self.patience_s = self._seconds[_PATIENCE_WORD] = seconds

    def operation_waited(self, op: OperationRecord, begin_s: float, end_s: float) -> None:
        if end_s - begin_s > self.patience_s:
            self._outwait(end_s - begin_s)
        path, slot = op.path, self._groups.get(op.group)
        message = path == "message"
        if slot is None:
            slot = 0 if message else self._group(op)
        what = (op.kind, path, op.dtype, op.label)
        number, words = next(self._counts[0]), self._words
        _pack_row(
            self._map, lay.RINGS_FROM + (number - 1) % _RING * _ROW_NBYTES, number & 0xFFFFFFFF, lay.WAIT, message,
            slot, self._whats.get(what) or self._what(what), op.seq & 0xFFFFFFFF, op.nbytes, begin_s, begin_s, begin_s,
            begin_s, end_s,
        )  # fmt: skip
        words[_ROWS_WORD] = number

    def message_waiting(self, peer: int, nbytes: int, receives: bool) -> None:
        lay.MESSAGE.pack_into(self._map, lay.MESSAGE_AT, time.perf_counter(), peer, nbytes, receives)

    def message_waited(self) -> None:
        self._seconds[lay.MESSAGE_AT // 8] = 0.0

    # --- the present ------------------------------------------------------------------------------------------------

    def enter(self, name: str) -> int:
        """Say that the main thread is in a phase; return what to give to `enter_again` at its end."""
        before = self._words[lay.PHASE_AT // 8]
        self._words[lay.PHASE_AT // 8] = self._texts.get(name) or self.text(name)
        return before

    def enter_again(self, before: int) -> None:
        """Say that the phase is over, and which one goes on."""
        self._words[lay.PHASE_AT // 8] = before

    def stepped(self, steps: int, seconds: float) -> None:
        """Say how many steps were made, and how long the last one took."""
        self._seconds[lay.STEP_S_AT // 8] = seconds
        self._words[lay.STEP_AT // 8] = steps

    def alive(self, stack: str | None, busy: float, nbytes: int = 0) -> None:
        """Say that the interpreter runs, where its main thread is, which share of a core it has, and the memory.

        A stack of None is the one before.
        """
        now_s = time.perf_counter()
        if stack is not None:
            raw = stack.encode(errors="replace")[: lay.STACK_NBYTES - lay.STACK.size]
            at = lay.STACK_AT + lay.STACK.size
            self._map[at : at + len(raw)] = raw
            lay.STACK.pack_into(self._map, lay.STACK_AT, now_s, len(raw))
        self._seconds[lay.BUSY_AT // 8] = busy
        self._words[lay.MEMORY_AT // 8] = nbytes
        self._seconds[lay.ALIVE_AT // 8] = now_s

    def waits_s(self) -> float:
        """Return for how many seconds this rank has been in an operation, or has waited for a message; 0.0 if not."""
        since_s = [self._seconds[lay.MESSAGE_AT // 8]]
        for at in range(0, self._words[lay.GROUPS_AT // 8] * _GROUP_WORDS, _GROUP_WORDS):
            if self._words[_STARTED_WORD + at] > self._words[_FINISHED_WORD + at]:
                since_s.append(self._seconds[_STARTED_S_WORD + at])
        return max((time.perf_counter() - begin_s for begin_s in since_s if begin_s), default=0.0)

    def ended(self) -> None:
        """Say that the program has ended by itself."""
        with contextlib.suppress(ValueError):
            self._seconds[lay.ENDED_AT // 8] = time.perf_counter()

    def quiet(self) -> bool:
        """Return once whether the last dump of stacks was asked for by a program."""
        found = bool(self._words[lay.QUIET_AT // 8])
        self._words[lay.QUIET_AT // 8] = 0
        return found
