"""Files of NCCL Inspector and of RCCL's: one JSON object for each operation of each communicator.

Their form (v4.0) is that of the README of ext-profiler/inspector in NVIDIA's NCCL.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ._dumps import DumpedOperation, DumpedRank


def inspected(folder: Path) -> list[DumpedRank]:
    """Return the ranks of a folder of JSON, in which each process wrote one object for an operation."""
    found: defaultdict[tuple[str, int], list[tuple[str, dict[str, Any], dict[str, Any]]]] = defaultdict(list)
    places: defaultdict[str, dict[int, tuple[str, int]]] = defaultdict(dict)  # of each rank of a communicator
    sizes: dict[str, int] = {}
    for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if not file.is_file() or file.suffix not in (".log", ".json", ".jsonl"):
            continue
        for record in _objects(file):
            header, about = record["header"], record["metadata"]
            process = (str(about["hostname"]), int(about["pid"]))
            comm = str(header["id"])
            places[comm][int(header["rank"])] = process
            sizes[comm] = int(header["n_ranks"])
            found[process].append((comm, about, record))
    if not found:
        return []
    # Ranks of the world are those of the largest communicator; a process that is not in it comes after them.
    whole = max(places, key=lambda comm: (sizes[comm], len(places[comm])))
    world = {process: rank for rank, process in sorted(places[whole].items())}
    for process in sorted(found.keys() - world.keys()):
        world[process] = max(world.values()) + 1
    groups = {
        comm: (comm, tuple(world[process] for _, process in sorted(members.items())))
        for comm, members in sorted(places.items())
    }
    ranks = []
    for process, records in found.items():
        operations = []
        for comm, about, record in records:
            for sort in ("coll", "p2p"):
                if (done := record.get(f"{sort}_perf")) is None:
                    continue
                trace = done.get("event_trace_ts", {})
                kernels = trace.get("kernel_events") or [{}]
                stops = [event["kernel_stop_ts"] for event in kernels if "kernel_stop_ts" in event]
                ended_s = (max(stops) if stops else about["dump_timestamp_us"]) * 1e-6
                kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(done[sort])).lower()
                operations.append(
                    DumpedOperation(
                        groups[comm], kind, int(done[f"{sort}_sn"]), int(done[f"{sort}_msg_size_bytes"]), "",
                        ended_s - done[f"{sort}_exec_time_us"] * 1e-6, ended_s,
                    )
                )  # fmt: skip
        operations.sort(key=lambda op: op.begun_s)
        mine = [group for group in groups.values() if world[process] in group[1]]
        ranks.append(DumpedRank(world[process], process[0], process[1], operations, mine))
    return ranks


def _objects(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file that follow each other, on one line each or on many; a last one may be torn."""
    text, at, decoder = file.read_text(errors="replace"), 0, json.JSONDecoder()
    while (at := text.find("{", at)) >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        if isinstance(value, dict) and "header" in value and "metadata" in value:
            yield value
