"""Dumps of PyTorch's flight recorder, read and written: `torchfrtrace` opens ours, and `hocket explain` opens theirs.

What a dump has is said by the loader and the types of torch/distributed/flight_recorder.
"""

import ast
import io
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import _layout as lay
from ._dumps import DumpedOperation, DumpedRank
from ._live import live_ranks
from ._read import RecordError, RunRecord

_DTYPES = {  # torch's name of a type, as c10 prints it, and its bytes
    "float32": ("Float", 4), "float64": ("Double", 8), "float16": ("Half", 2), "bfloat16": ("BFloat16", 2),
    "uint8": ("Byte", 1), "int8": ("Char", 1), "int16": ("Short", 2), "int32": ("Int", 4), "int64": ("Long", 8),
    "bool": ("Bool", 1), "complex64": ("ComplexFloat", 8), "complex128": ("ComplexDouble", 16),
}  # fmt: skip
_NAMES = {printed: name for name, (printed, _) in _DTYPES.items()}
_VERSION = "2.10"
_LIBRARY = "gloo"  # torchfrtrace knows the names of some libraries only, and refuses others
_KINDS = {"_allgather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter", "all_reduce_barrier": "barrier"}


class _PlainValues(pickle.Unpickler):
    """Reads plain values only: a pickle can name any function, and a dump has no need of one."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump of the flight recorder has no {module}.{name}")


def flight_records(folder: Path) -> Iterator[DumpedRank]:
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        number = re.search(r"(\d+)$", file.name)
        if number is None or not file.is_file():
            continue
        raw = file.read_bytes()
        if raw[:1] != b"\x80":
            continue
        try:
            dump = _PlainValues(io.BytesIO(raw)).load()
            yield _flight_record(int(number.group()), dump)
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise RecordError(
                f"{str(file)!r} is no dump of PyTorch's flight recorder that can be read: {error!r}"
            ) from None


def _flight_record(rank: int, dump: dict[str, Any]) -> DumpedRank:
    groups: dict[str, tuple[str, tuple[int, ...]]] = {}
    for uid, config in dump["pg_config"].items():
        ranks = config["ranks"]
        ranks = ast.literal_eval(ranks) if isinstance(ranks, str) else ranks
        desc = config.get("desc", "undefined")
        groups[str(uid)] = (str(uid) if desc in ("undefined", "") else str(desc), tuple(map(int, ranks)))
    operations = []
    for entry in dump["entries"]:
        uid = str(entry["process_group"][0])
        kind = str(entry["profiling_name"]).partition(":")[2].partition(" ")[0]
        messages = kind in ("send", "recv")
        begun = entry.get("time_discovered_started_ns") or entry["time_created_ns"]
        ended = entry.get("time_discovered_completed_ns")
        if ended is None and (entry["state"] == "completed" or entry.get("retired")):
            ended = begun
        if messages or uid not in groups:
            continue
        dtype, nbytes = _full(entry)
        operations.append(
            DumpedOperation(
                groups[uid], _KINDS.get(kind, kind), int(entry["collective_seq_id"]), nbytes, dtype, begun * 1e-9,
                None if ended is None else ended * 1e-9,
                tuple(f"{f['filename']}:{f['line']} {f['name']}" for f in entry.get("frames", [])),
            )
        )  # fmt: skip
    return DumpedRank(rank, "", 0, operations, list(dict.fromkeys(groups.values())))


def _full(entry: dict[str, Any]) -> tuple[str, int]:
    """Return the type, and the bytes of the full vector: the larger of what goes in and what comes out."""
    found = [("", 0)]
    for side in ("input", "output"):
        sizes, dtypes = entry.get(f"{side}_sizes") or [], entry.get(f"{side}_dtypes") or []
        if dtypes:
            dtype = _NAMES.get(str(dtypes[0]), str(dtypes[0]).lower())
            found.append((dtype, sum(math.prod(size) for size in sizes) * _DTYPES.get(dtype, ("", 1))[1]))
    return max(found, key=lambda one: one[1]) if len(found) > 1 else found[0]


def write_flight_records(run: RunRecord, folder: Path) -> None:
    """Write the collectives of each rank as PyTorch's flight recorder does, a file a rank; `torchfrtrace` opens them.

    Messages between two ranks are left out, since a record does not name their peers.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    live = {one.rank: one for one in live_ranks(run.folder)}
    for one in run.ranks:
        uids, seen = [], defaultdict[tuple[str, tuple[int, ...]], int](int)
        for group in one.groups:  # a second life of torch.distributed has groups of the same names
            seen[group] += 1
            uids.append(group[0] if seen[group] == 1 else f"{group[0]} ({seen[group]})")
        config = {
            uid: {"name": uid, "desc": uid, "ranks": str(list(ranks))}
            for uid, (_, ranks) in zip(uids, one.groups, strict=True)
        }
        entries: list[dict[str, Any]] = []
        for row in one.of(lay.OPERATION):
            kind, _, dtype, _ = one.texts[int(row["text"])]
            if kind in ("send", "recv"):
                continue
            slot = int(row["group"])
            times = [int((run.epoch_s + float(row[name])) * 1e9) for name in ("posted_s", "started_s", "finished_s")]
            entries.append(
                _entry(uids[slot], len(one.groups[slot][1]), kind, dtype, int(row["seq"]), int(row["nbytes"]), *times)
            )
        for now in live[one.rank].groups if one.rank in live else ():
            if now.waits and (now.name, now.ranks) in one.groups:
                slot = len(one.groups) - 1 - one.groups[::-1].index((now.name, now.ranks))
                begun = entries[-1]["time_discovered_completed_ns"] if entries else int(run.epoch_s * 1e9)
                dtypes = {e["profiling_name"]: e["input_dtypes"][0] for e in entries}
                dtype = dtypes.get(f"{_LIBRARY}:{now.kind}", "Float")
                entries.append(
                    _entry(
                        uids[slot], len(now.ranks), now.kind, _NAMES[dtype], now.started, now.nbytes, begun, begun, None
                    )
                )
        for number, entry in enumerate(entries):
            entry["record_id"] = number
        dump = {"version": _VERSION, "pg_config": config, "entries": entries}
        with (folder / f"trace_rank_{one.rank}").open("wb") as file:
            pickle.dump(dump, file)


def _entry(
    uid: str, world: int, kind: str, dtype: str, seq: int, nbytes: int, posted: int, started: int, ended: int | None
) -> dict[str, Any]:
    printed, size = _DTYPES.get(dtype, ("Byte", 1))
    whole = nbytes // size
    part, uneven = whole // max(world, 1), whole % max(world, 1) != 0
    numels = {
        "all_gather": (part, whole), "gather": (part, whole), "reduce_scatter": (whole, part), "scatter": (whole, part)
    }.get(kind, (whole, whole))  # fmt: skip
    if uneven and kind in ("all_gather", "reduce_scatter"):
        kind += "_v"
    return {
        "record_id": 0, "pg_id": 0, "process_group": (uid, uid), "collective_seq_id": seq, "p2p_seq_id": 0,
        "op_id": seq, "profiling_name": f"{_LIBRARY}:{kind}", "time_created_ns": posted,
        "duration_ms": 0.0 if ended is None else (ended - started) / 1e6,
        "input_sizes": [[numels[0]]], "input_dtypes": [printed],
        "output_sizes": [[numels[1]]], "output_dtypes": [printed],
        "state": "started" if ended is None else "completed", "time_discovered_started_ns": started,
        "time_discovered_completed_ns": ended, "retired": ended is not None, "timeout_ms": 0,
        "is_p2p": False, "frames": [],
    }  # fmt: skip
