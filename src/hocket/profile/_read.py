"""Reads what the ranks of a run have left: rows of all records, on one clock."""

import mmap
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from . import _layout as lay
from ._live import files_of_newest, texts_of

Rows = np.ndarray[Any, Any]
_MOST_ROWS = 8_000_000  # of each kind are read, of all ranks: half a gigabyte, and the waits besides


class RecordError(ValueError):
    """There is no record where one was asked for; the message says what is expected."""


@dataclass(frozen=True)
class RankRun:
    """What one rank did; times are seconds of the run's clock, which begins when the first rank did.

    Attributes:
        rank: Its number.
        world: How many ranks there were.
        host: Its host.
        pid: Its process.
        about: What the rank said of itself at the beginning: command, cores, ...
        texts: Texts that rows have numbers of.
        groups: Name and ranks of every group.
        operations: Rows of OPERATION and WAIT, by their ends, as `_layout.ROW_TYPE` has them.
        events: Rows of everything else.
        lost: How many rows were overwritten by later ones, or are left out because the run has so many ranks.
        ended_s: When the program ended; None if it did not say so.
        last_s: When it was last heard of.
    """

    rank: int
    world: int
    host: str
    pid: int
    about: dict[str, Any]
    texts: list[Any] = field(repr=False)
    groups: list[tuple[str, tuple[int, ...]]]
    operations: Rows = field(repr=False)
    events: Rows = field(repr=False)
    lost: int
    ended_s: float | None
    last_s: float

    def of(self, kind: int, name: str | None = None) -> Rows:
        """Return the rows of one type, and of one name if given, by their ends."""
        rows = self.operations if kind in (lay.OPERATION, lay.WAIT) else self.events
        chosen = rows["type"] == kind
        if name is not None:
            chosen &= np.isin(rows["text"], [n for n, text in enumerate(self.texts) if text == name])
        return np.asarray(rows[chosen])

    @cached_property
    def steps(self) -> Rows:
        """The ends of the steps, the beginning of the first before them: step i lasted from i to i + 1."""
        rows = self.of(lay.STEP)
        rows = rows[rows["finished_s"] > rows["started_s"]]
        return np.concatenate([rows["started_s"][:1], rows["finished_s"]]) if len(rows) else np.empty(0)

    @cached_property
    def notes(self) -> dict[str, Any]:
        """What the program said of itself (`hocket.profile.note`), by name; the last of each name."""
        return {text["note"]: text["value"] for text in self.texts if isinstance(text, dict) and "note" in text}

    def values(self) -> dict[str, Rows]:
        """Return what the program told of its steps, by name in the order of first mention: step, at_s, value."""
        rows = self.of(lay.VALUE)
        found: dict[str, Rows] = {}
        for text in dict.fromkeys(rows["text"].tolist()):
            some = rows[rows["text"] == text]
            values = np.empty(len(some), [("step", "<i8"), ("at_s", "<f8"), ("value", "<f8")])
            values["step"], values["at_s"], values["value"] = some["seq"], some["posted_s"], some["started_s"]
            found[str(self.texts[text])] = values
        return found

    def phases(self) -> dict[str, Rows]:
        """Return begin and end of every phase by its name, an array of two columns each."""
        rows = self.of(lay.PHASE)
        return {
            self.texts[text]: np.stack([found["started_s"], found["finished_s"]], 1)
            for text in np.unique(rows["text"])
            for found in [rows[rows["text"] == text]]
        }


@dataclass(frozen=True)
class RunRecord:
    """The records of all ranks of a run.

    Attributes:
        folder: Where they are.
        ranks: The ranks, in their order.
        epoch_s: Seconds since the epoch at the run's zero.
        others: Ranks whose record there is of another run, and is left out.
    """

    folder: Path
    ranks: tuple[RankRun, ...]
    epoch_s: float
    others: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        """How many ranks the run had, whether they left records or not."""
        return self.ranks[0].world

    @property
    def seconds(self) -> float:
        """How long the run was recorded."""
        return max(one.last_s for one in self.ranks)


def find_folder(path: Path) -> Path:
    """Return where the records are: a folder of them, or a run's folder; else the newest run below it.

    Raises:
        RecordError: there are none.
    """
    for place in (path, path / lay.FOLDER):
        if any(place.glob("rank-*.record")):
            return place
    below = [*path.glob(f"*/{lay.FOLDER}/rank-*.record"), *path.glob("*/rank-*.record")]
    if below:
        return max(below, key=lambda file: file.stat().st_mtime).parent
    raise RecordError(
        f"{str(path)!r} holds no record of a run (rank-00000.record); `hocket run` makes one, and so does any job on "
        "backend hocket where HOCKET_RECORD names a folder"
    )


def read_run(path: str | Path) -> RunRecord:
    """Read the records in a folder, of a run that is over or that still runs.

    Ranks whose clocks differ (hosts) are aligned by what they did together: no rank ends an operation before the last
    has come to it, so the same operations end at nearly the same time.

    Raises:
        RecordError: there are none, or all are damaged.
    """
    folder = find_folder(Path(path))
    found = []
    files = files_of_newest(folder)
    most = max(1_000, _MOST_ROWS // max(1, len(files)))
    for file in files:
        if file.stat().st_size != lay.file_nbytes():
            continue
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            if raw[:8] == lay.MAGIC:
                with suppress(ValueError, IndexError):  # texts or groups are damaged
                    found.append(_rank(raw, most))
    if not found:
        raise RecordError(f"the records in {str(folder)!r} are damaged, or of another version of hocket")
    ranks = _aligned([one for one, _ in found], [epoch_s for _, epoch_s in found])
    zero_s = min(_begin(one) for one in ranks)
    others = {file.stem.removeprefix("rank-") for file in {*folder.glob("rank-*.record")} - {*files}}
    return RunRecord(
        folder, tuple(_shifted(one, -zero_s) for one in ranks), found[0][1] + zero_s,
        tuple(sorted({int(name) for name in others if name.isdecimal()} & set(range(ranks[0].world)))),
    )  # fmt: skip


def _shifted(one: RankRun, by_s: float) -> RankRun:
    """Return the same, whose rows are changed, on a clock that shows `by_s` seconds more."""
    one.operations["posted_s"] += by_s
    one.events["posted_s"] += by_s
    times = ~np.isin(one.events["type"], lay.POINTS)
    for name in ("started_s", "published_s", "arrived_s", "finished_s"):
        one.operations[name] += by_s
        one.events[name][times] += by_s
    ended_s = None if one.ended_s is None else one.ended_s + by_s
    return replace(one, ended_s=ended_s, last_s=one.last_s + by_s)


def _rank(raw: mmap.mmap, most: int) -> tuple[RankRun, float]:
    _, rank, world, pid, _, _, epoch_s, begun_s, *_ = lay.HEAD.unpack_from(raw)
    texts = texts_of(raw)
    words, seconds = np.frombuffer(raw[:4096], "<u8"), np.frombuffer(raw[:4096], "<f8")
    rings, lost = [], 0
    for ring in (0, 1):
        written, size = int(words[lay.ROWS_AT[ring] // 8]), lay.RING_ROWS[ring]
        kept = min(written, size, most)
        rows = _last_rows(raw, ring, written, kept)
        # A row that is just being written has the number of its predecessor, or none; a damaged one any text's.
        whole = rows["number"] == np.arange(written - kept + 1, written + 1) & 0xFFFFFFFF
        rings.append(rows[whole & (rows["text"] < len(texts))])
        lost += written - kept
    rings[0] = _with_waits(rings[0])
    count = min(int(words[lay.GROUPS_AT // 8]), lay.GROUPS)
    groups = []
    for row in np.frombuffer(raw[lay.GROUPS_FROM : lay.TEXTS_FROM], lay.GROUP, count):
        name, *members = texts[row["members"]] or [""]
        groups.append((str(name), tuple(int(member) for member in members)))
    ended_s = float(seconds[lay.ENDED_AT // 8])
    last_s = max(begun_s, float(seconds[lay.ALIVE_AT // 8]), ended_s, *rings[0]["finished_s"].tolist()[-1:])
    about = texts[1] if len(texts) > 1 else {}
    run = RankRun(
        rank, world, about.get("host", ""), pid, about, texts, groups, rings[0], rings[1], lost, ended_s or None, last_s
    )
    return run, epoch_s


def _with_waits(rows: Rows) -> Rows:
    """Return the rows, behind each operation that its caller carried out the row of its wait."""
    inline = (rows["type"] == lay.OPERATION) & (rows["flags"] & lay.INLINE > 0)
    times = np.where(inline, 2, 1)
    found = np.repeat(rows, times)
    waits = found[np.cumsum(times)[inline] - 1]
    waits["type"], waits["flags"] = lay.WAIT, 0
    for name in ("started_s", "published_s", "arrived_s"):
        waits[name] = waits["posted_s"]
    found[np.cumsum(times)[inline] - 1] = waits
    return found


def _last_rows(raw: mmap.mmap, ring: int, written: int, kept: int) -> Rows:
    """Return a copy of the last rows of a ring, in their order."""
    first, parts = (written - kept) % lay.RING_ROWS[ring], []
    for begin, end in ((first, first + kept), (0, first + kept - lay.RING_ROWS[ring])):
        end, at = min(end, lay.RING_ROWS[ring]), lay.ring_at(ring)
        if end > begin:
            parts.append(raw[at + begin * lay.ROW.size : at + end * lay.ROW.size])
    return np.frombuffer(bytearray(b"".join(parts)), lay.ROW_TYPE)


def _begin(one: RankRun) -> float:
    return float(min([one.last_s, *(rows["posted_s"].min() for rows in (one.operations, one.events) if len(rows))]))


def _aligned(ranks: list[RankRun], epochs_s: list[float]) -> list[RankRun]:
    """Return the ranks on the clock of the first."""
    first, aligned = ranks[0], []
    for one, epoch_s in zip(ranks, epochs_s, strict=True):
        shift_s = 0.0
        if one.about.get("boot") != first.about.get("boot"):
            mine, theirs = _ends(one), _ends(first)
            common = sorted(mine.keys() & theirs.keys())[-2000:]
            known = [theirs[key] - mine[key] for key in common]
            shift_s = float(np.median(known)) if known else epoch_s - epochs_s[0]
        aligned.append(_shifted(one, shift_s) if shift_s else one)
    return aligned


def _ends(one: RankRun) -> dict[tuple[str, tuple[int, ...], int], float]:
    rows = one.of(lay.OPERATION)
    return {(*one.groups[row["group"]], int(row["seq"])): float(row["finished_s"]) for row in rows}
