"""Other tools' dumps of the ranks of a job as the record of a run, so that what reads records reads them too.

They hold operations only: no steps, no phases, no memory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import _layout as lay
from ._dumps import DumpedRank
from ._flight_recorder import flight_records
from ._inspector import inspected
from ._live import InGroup, LiveRank, live_ranks
from ._read import RankRun, RecordError, RunRecord, read_run


def read_any(path: str | Path) -> tuple[RunRecord, list[LiveRank]]:
    """Read a run's records, and what its ranks do or did last; or a folder of another tool's dumps.

    Raises:
        RecordError: there is neither, or they are damaged.
    """
    try:
        run = read_run(path)
    except RecordError as error:
        folder = Path(path)
        ranks = list(flight_records(folder)) or inspected(folder)
        if not ranks:
            raise RecordError(
                f"{error}; nor are there dumps of PyTorch's flight recorder, or JSON of NCCL Inspector"
            ) from None
        return run_of(folder, ranks)
    return run, live_ranks(run.folder)


def run_of(folder: Path, ranks: Sequence[DumpedRank]) -> tuple[RunRecord, list[LiveRank]]:
    known = [max(g[1], default=0) + 1 for one in ranks for g in one.groups]
    world = max([max(one.rank for one in ranks) + 1, *known])
    times = [at for one in ranks for op in one.operations for at in (op.begun_s, op.ended_s) if at is not None]
    zero_s, last_s = min(times, default=0.0), max(times, default=0.0)
    runs, live = [], []
    for one in sorted(ranks, key=lambda rank: rank.rank):
        texts: list[Any] = ["", {"host": one.host, "operations_only": True}]
        numbers: dict[tuple[str, str], int] = {}
        rows = np.zeros(len(one.operations), lay.ROW_TYPE)
        for row, op in zip(rows, one.operations, strict=True):
            if (op.kind, op.dtype) not in numbers:
                numbers[op.kind, op.dtype] = len(texts)
                texts.append([op.kind, "", op.dtype, ""])
            begun_s, ended_s = op.begun_s - zero_s, (last_s if op.ended_s is None else op.ended_s) - zero_s
            row["type"], row["group"], row["text"] = (
                lay.OPERATION,
                one.groups.index(op.group),
                numbers[op.kind, op.dtype],
            )
            row["seq"], row["nbytes"], row["finished_s"] = op.seq, op.nbytes, ended_s
            for name in ("posted_s", "started_s", "published_s", "arrived_s"):
                row[name] = begun_s
        rows = rows[np.argsort(rows["finished_s"], kind="stable")]
        runs.append(
            RankRun(
                one.rank, world, one.host, one.pid, texts[1], texts, one.groups, rows, np.zeros(0, lay.ROW_TYPE), 0,
                None, last_s - zero_s,
            )
        )  # fmt: skip
        live.append(_last(one, world, last_s))
    return RunRecord(folder, tuple(runs), zero_s), live


def _last(one: DumpedRank, world: int, last_s: float) -> LiveRank:
    """Return where a rank stood when its dump was made."""
    groups = []
    for group in one.groups:
        mine = [op for op in one.operations if op.group == group]
        if mine:
            latest = max(mine, key=lambda op: op.seq)
            ended = max((op.seq for op in mine if op.ended_s is not None), default=latest.seq - 1)
            groups.append(InGroup(*group, latest.kind, latest.nbytes, latest.seq, ended, latest.begun_s))
    waits = [group.started_s for group in groups if group.waits]
    place = one.operations[-1].place if one.operations else ()
    return LiveRank(
        one.rank, world, one.host, one.pid, "recorded", tuple(groups), place, 0.0, "", 0, None, False,
        last_s - min(waits) if waits else 0.0, 0.0,
    )  # fmt: skip
