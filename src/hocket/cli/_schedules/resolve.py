"""From words on the command line to a schedule and the cluster that it is for."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.algorithms import Algorithm, cluster_tree, get, parse_spelled
from hocket.cluster import Cluster, ClusterError, load
from hocket.schedule import Collective, Schedule, ScheduleError, from_json, from_msccl, parse

from .orders import text_of

DEFAULT_WORLD = 4


@dataclass(frozen=True, slots=True)
class Asked:
    """A schedule, where it comes from and where it is to run."""

    schedule: Schedule  # schedule to look at
    algorithm: Algorithm | None  # algorithm that made it; None if it was read from a file
    parameters: dict[str, Any]  # parameters of the algorithm
    cluster: Cluster | None  # cluster that was given with it, or None


def resolve(word: str, kind: str, world: int | None, root: int, cluster_word: str | None) -> Asked:
    """Build or read the schedule that is meant.

    `word` is an algorithm with parameters (`double_tree pieces=4`), or a file: text, `.json`, or MSCCL's `.xml`; the
    world is by default all of the cluster's, or 4 ranks.

    Raises:
        ScheduleError: the word, or what it asks for, makes no sense.
        ClusterError: the cluster does not.
    """
    cluster = None if cluster_word is None else load(cluster_word)
    if Path(word).suffix in (".txt", ".json", ".xml") or (os.path.exists(word) and not os.path.isdir(word)):
        read = _read(Path(word))
        made = read.collective
        same = world in (None, made.world) and root in (0, made.root)
        if not same or kind not in ("all_reduce", made.kind):
            wanted = Collective(kind, world or made.world, root)
            raise ScheduleError(f"{word} is {made}, and {wanted} was asked for; leave that out, or give one of that")
        return Asked(read, None, {}, cluster)
    name, parameters = parse_spelled(word)
    ranks = world if world is not None else DEFAULT_WORLD if cluster is None else len(cluster.ranks)
    given: dict[str, Any] = dict(parameters)
    if cluster is not None:
        given = {**_from_cluster(name, cluster, ranks), **given}
    algorithm = get(name)
    return Asked(algorithm.build(Collective(kind, ranks, root), **given), algorithm, given, cluster)


def _from_cluster(name: str, cluster: Cluster, world: int) -> dict[str, Any]:
    """Return the parameters that the cluster's form decides."""
    if name == "aggregation_tree":
        parents, switches = cluster_tree(cluster, range(world))
        return {"parents": parents, "switches": switches}
    if name == "hdrm":
        upper = sum(node.startswith("upper") for node in cluster.node_names)
        lower = sum(node.startswith("lower") for node in cluster.node_names)
        if not upper or upper != lower or world % (2 * upper):
            raise ScheduleError(
                f"hdrm needs a BiGraph, all of whose ports are in use by the {world} ranks; {cluster.name} has "
                f"{upper} upper and {lower} lower switches"
            )
        return {"upper": upper, "ports": world // (2 * upper)}
    return {}


def _read(path: Path) -> Schedule:
    try:
        text = text_of(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"the file {str(path)!r} cannot be read: {error}") from None
    try:
        return {".json": from_json, ".xml": from_msccl}.get(path.suffix, parse)(text)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None


__all__ = ["Asked", "ClusterError", "ScheduleError", "resolve"]
