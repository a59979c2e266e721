"""What every rank does now, or did last: the heads of their records, and what the system says of their processes."""

import contextlib
import json
import math
import mmap
import os
import signal
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hocket._sweep import start_ticks, stat_of

from . import _layout as lay
from ._stacks import stacks_of

_STALE_S = 1.8  # the watcher of a rank runs four times a second, unless compiled code keeps the interpreter's lock
_DUMP_S = 1.0
_HEAR_S = 1.2  # for a rank of another host to say once more that it is alive; less than this watcher may be silent
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<", _PACKAGE)


@dataclass(frozen=True, slots=True)
class InGroup:
    """Where a rank stands in a group.

    Attributes:
        name: What torch calls the group, or its number.
        ranks: Its ranks, as numbers of the world.
        kind: Kind of the latest operation.
        nbytes: Its bytes.
        started: Its number.
        finished: Number of the last one that has finished.
        started_s: When it began, perf_counter of the rank's host.
    """

    name: str
    ranks: tuple[int, ...]
    kind: str
    nbytes: int
    started: int
    finished: int
    started_s: float

    @property
    def waits(self) -> bool:
        """Whether the rank is in the middle of it."""
        return self.started > self.finished


@dataclass(frozen=True, slots=True)
class LiveRank:
    """One rank, now.

    Attributes:
        rank: Its number.
        world: How many there are.
        host: Its host.
        pid: Its process.
        state: "running"; "blocked" (no use of the core); "stopped" (by a signal or a debugger); "native" (compiled code
            that does not let Python run); "dead"; "ended" (its program was over); "silent" (of another host, nothing
            heard); "recorded" (known of another tool's dump only).
        groups: The groups, by name and then in the order of their making.
        stack: Its main thread, as "FILE:LINE FUNCTION", the innermost first; `stack_age_s` old.
        stack_age_s: Seconds.
        phase: Phase that it says it is in, or "".
        steps: Steps that it has made.
        peer: Rank whose message it waits for; -1 for any; None for no message.
        receives: Whether it waits to receive.
        waits_s: How long it has waited in an operation or for a message; 0.0 if it does not.
        busy: Share of a core that its main thread had in the last quarter of a second.
        nbytes: Its resident memory.
        step_s: How long its last step took, in seconds; 0.0 before one has ended.
    """

    rank: int
    world: int
    host: str
    pid: int
    state: str
    groups: tuple[InGroup, ...]
    stack: tuple[str, ...]
    stack_age_s: float
    phase: str
    steps: int
    peer: int | None
    receives: bool
    waits_s: float
    busy: float
    nbytes: int = 0
    step_s: float = 0.0

    @property
    def waiting(self) -> InGroup | None:
        """The operation that it is in the middle of, the one that began first; None if it is in none."""
        return min((group for group in self.groups if group.waits), key=lambda one: one.started_s, default=None)

    @property
    def gone(self) -> bool:
        """Whether it cannot go on by itself."""
        return self.state in ("dead", "ended", "stopped", "silent")

    def where(self) -> str:
        """Return where its program is, "loader.py:88 (next_batch)"; "" where nobody knows."""
        return short_place(users_frame(self.stack))


def live_ranks(folder: Path, *, dump: bool = True) -> list[LiveRank]:
    """Return the ranks whose records are in a folder, in their order.

    Args:
        folder: Where the records are.
        dump: Whether ranks whose interpreter does not answer are asked for their stacks by SIGQUIT.
    """
    paths = files_of_newest(folder)
    found, begun_s = [], time.perf_counter()
    said = {path: _alive_s(path) for path in paths}
    for path in paths:
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            found.append(_read(path, dump, said[path], begun_s + _HEAR_S))
    return found


def files_of_newest(folder: Path) -> list[Path]:
    """Return the records of the job that began last in a folder, and not those of one before it.

    Jobs differ in the number of their ranks, or in the name that their ranks have agreed on.
    """
    found: dict[Path, tuple[int, bytes]] = {}
    newest = (-math.inf, 0, b"")
    for path in sorted(folder.glob("rank-*.record")):
        world, name, begun_s = 0, b"", -math.inf  # where it is damaged
        with contextlib.suppress(OSError, struct.error), path.open("rb") as file:
            head = file.read(lay.RUN_AT + lay.RUN_NBYTES)
            magic, _, ranks, _, _, _, epoch_s, since_s, *_ = lay.HEAD.unpack_from(head)
            if magic == lay.MAGIC:
                world, name, begun_s = ranks, head[lay.RUN_AT :].strip(b"\0"), epoch_s + since_s
        found[path] = (world, name)
        newest = max(newest, (begun_s, world, name))
    return [
        path
        for path, (world, name) in found.items()
        if not world or (world == newest[1] and (name == newest[2] or not name or not newest[2]))
    ]


def pid_namespace() -> str:
    """Return in which namespace process numbers of this process count; "" where that is not known."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def texts_of(raw: Any) -> list[Any]:
    """Return the texts of a record, by number; 0 is none."""
    end = int.from_bytes(raw[lay.TEXTS_AT : lay.TEXTS_AT + 8], "little")
    texts = bytes(raw[lay.TEXTS_FROM : lay.TEXTS_FROM + end])
    found: list[Any] = [""]
    at = 0
    while at < len(texts):
        length = int.from_bytes(texts[at : at + 2], "little")
        found.append(json.loads(texts[at + 2 : at + 2 + length]))
        at += 2 + length
    return found


def users_frame(stack: tuple[str, ...] | list[str]) -> str:
    """Return the innermost frame that is of the program itself, not of a library; else the innermost; "" for none."""
    for line in stack:
        file, _, _ = line.rpartition(" ")  # a function may be called <module> or f.<locals>.g
        if not any(part in file for part in _LIBRARIES):
            return line
    return stack[0] if stack else ""


def short_place(frame: str) -> str:
    """Return "loader.py:88 (next_batch)" for a frame with its whole path."""
    path, _, function = frame.rpartition(" ")
    place = os.path.basename(path or frame)
    return f"{place} ({function})" if path and function != "<module>" else place


def _alive_s(path: Path) -> float:
    """Return when a rank last said that it is alive, on its host's clock; NaN if its record does not tell."""
    with contextlib.suppress(OSError, struct.error), path.open("rb") as file:
        return float(struct.unpack("<d", os.pread(file.fileno(), 8, lay.ALIVE_AT))[0])
    return math.nan


def _read(path: Path, dump: bool, said_s: float, heard_until_s: float) -> LiveRank:
    with path.open("rb") as file, mmap.mmap(file.fileno(), lay.RINGS_FROM, access=mmap.ACCESS_READ) as view:
        raw = bytes(view)
    magic, rank, world, pid, _, began, epoch_s, _, *_ = lay.HEAD.unpack_from(raw)
    if magic != lay.MAGIC:
        raise ValueError(f"{path} is no record of this version")
    words, seconds = np.frombuffer(raw, "<u8", 512), np.frombuffer(raw, "<f8", 512)
    texts = texts_of(raw)
    about = texts[1]
    here = about["boot"] == boot_of_this_host()
    stack_s, length = lay.STACK.unpack_from(raw, lay.STACK_AT)
    at = lay.STACK_AT + lay.STACK.size
    stack = tuple(raw[at : at + length].decode(errors="replace").splitlines())
    alive_s = float(seconds[lay.ALIVE_AT // 8])
    now_s = time.perf_counter() if here else time.time() - epoch_s
    if not here and not seconds[lay.ENDED_AT // 8] and not 0.0 <= now_s - alive_s <= 4 * _STALE_S:
        # Its calendar may be another: what it says next tells that it lives, and what its clock shows.
        while (alive_s := _alive_s(path)) == said_s and time.perf_counter() < heard_until_s:
            time.sleep(0.05)
        now_s = alive_s if alive_s != said_s else max(now_s, alive_s + 5 * _STALE_S)
    silent_s = now_s - alive_s
    busy = float(seconds[lay.BUSY_AT // 8])
    seen = here and about.get("pids", pid_namespace()) == pid_namespace()  # another container's numbers are its own
    state = "ended" if seconds[lay.ENDED_AT // 8] else _state(pid, began, silent_s, busy, seen)
    if state == "native" and dump and (dumped := _dumped(path, pid)):
        stack, stack_s = dumped, now_s
    since_s, peer, _, receives = lay.MESSAGE.unpack_from(raw, lay.MESSAGE_AT)
    groups = _groups(raw, int(words[lay.GROUPS_AT // 8]), texts)
    begun = [group.started_s for group in groups if group.waits] + ([since_s] if since_s else [])
    return LiveRank(
        rank, world, about["host"], pid, state, groups, stack, now_s - stack_s, texts[int(words[lay.PHASE_AT // 8])],
        int(words[lay.STEP_AT // 8]), peer if since_s else None, bool(receives),
        max(0.0, now_s - min(begun)) if begun else 0.0, busy, int(words[lay.MEMORY_AT // 8]),
        float(seconds[lay.STEP_S_AT // 8]),
    )  # fmt: skip


def _groups(raw: bytes, count: int, texts: list[Any]) -> tuple[InGroup, ...]:
    table = np.frombuffer(raw, lay.GROUP, min(count, lay.GROUPS), lay.GROUPS_FROM)
    found = []
    for row in table:
        name, *ranks = texts[row["members"]] or [str(row["name"])]
        what = texts[row["kind"]]
        found.append(
            InGroup(
                name, tuple(ranks), what, int(row["nbytes"]), int(row["started"]), int(row["finished"]),
                float(row["started_s"]),
            )
        )  # fmt: skip
    return tuple(found)


def _state(pid: int, began: int, silent_s: float, busy: float, here: bool) -> str:
    if not here:
        return "silent" if silent_s > 4 * _STALE_S else _use(busy)
    if start_ticks(pid) != began:
        return "dead"
    letter = stat_of(pid)[0]
    if letter in "ZX":
        return "dead"
    if letter in "tT":
        return "stopped"
    return "native" if silent_s > _STALE_S else _use(busy)


def _use(busy: float) -> str:
    return "running" if busy > 0.05 else "blocked"


def _dumped(path: Path, pid: int) -> tuple[str, ...]:
    """Return the stack of a rank's main thread as its signal handler writes it, which needs no interpreter."""
    file = path.with_suffix(".stacks")
    if not file.exists():
        return ()
    before = file.stat().st_size
    with path.open("rb+") as record:
        record.seek(lay.QUIET_AT)
        record.write((1).to_bytes(8, "little"))
    try:
        os.kill(pid, signal.SIGQUIT)
    except OSError:
        return ()
    give_up_s = time.monotonic() + _DUMP_S
    while time.monotonic() < give_up_s and file.stat().st_size == before:
        time.sleep(0.02)
    time.sleep(0.05)
    with file.open("rb") as dump:
        dump.seek(before)
        stacks = stacks_of(dump.read().decode(errors="replace"))
    return tuple(list(stacks.values())[-1]) if stacks else ()  # the main thread stands last


def boot_of_this_host() -> str:
    """Return what names this host until it starts anew, or its name where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
