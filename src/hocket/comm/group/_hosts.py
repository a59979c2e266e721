"""Chooses the transport of a group: one host, several hosts with several ranks each, or an engine for all."""

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from .. import torch_adapter as c10d
from ..aggregated import open_beside_aggregator
from ..engines import EnginePointToPoint, EngineTransport
from ..p2p import TagMatcher, publish_streams
from ..scheduled import ScheduledTransport, Subset, TwoLevelTransport
from ..shm import Channel, SharedMemoryTransport, host_identity
from ..shm import bootstrap as _bootstrap
from ..transport import Transport

log = logging.getLogger("hocket.comm")


class Opened(NamedTuple):
    """What serves a group."""

    transport: Transport  # transport of the group's collectives
    channel: Channel | None  # the meeting place of this host's ranks, if it has one
    matcher: TagMatcher | None  # matcher of the group's sends and receives; None where the engine does them


def open_transport(
    store: Any, name: str, rank: int, size: int, timeout: timedelta, global_ranks: Sequence[int], gloo: Any
) -> Opened:
    """Find out where the ranks of a group run, and open what serves them best; all ranks come to the same answer."""
    flat = EngineTransport(gloo, "gloo")
    if size == 1:
        return Opened(flat, None, None)
    hosts = _hosts(store, rank, size, timeout)
    points = EnginePointToPoint(gloo, "gloo")
    scheduled: Transport = ScheduledTransport(points, rank, size, flat)
    mine = next(ranks for ranks in hosts if rank in ranks)
    if len({len(ranks) for ranks in hosts}) > 1 or len(mine) == 1:
        log.debug("group %s: hosts with %s ranks; schedules over gloo", name, [len(ranks) for ranks in hosts])
        beside = open_beside_aggregator(scheduled, store, name, list(range(size)), rank, global_ranks, timeout)
        return Opened(beside, None, None)
    local = mine.index(rank)
    numbers = [global_ranks[r] for r in mine]
    inner = store if len(hosts) == 1 else c10d.PrefixStore(f"host-{mine[0]}/", store)
    streams = publish_streams(inner, local, len(mine)) if len(hosts) == 1 else None  # known before anyone goes on
    channel = _bootstrap.connect(inner, name, local, len(mine), timeout, numbers)
    if streams is not None and channel is not None:
        streams.map_all()
    if not _all_agree(store, rank, size, timeout, channel is not None):
        return Opened(scheduled, None, None)
    assert channel is not None
    inside = SharedMemoryTransport(channel)
    if streams is not None:
        return Opened(inside, channel, TagMatcher(streams, name, tuple(numbers), timeout.total_seconds()))
    rail = [ranks[local] for ranks in hosts]
    between: Transport = ScheduledTransport(Subset(points, rail), rail.index(rank), len(rail), flat)
    between = open_beside_aggregator(between, store, name, rail, rank, global_ranks, timeout)
    return Opened(TwoLevelTransport(hosts, rank, inside, between, scheduled), channel, None)


def _hosts(store: Any, rank: int, size: int, timeout: timedelta) -> list[list[int]]:
    """Return the ranks of each host, hosts in the order of their first ranks."""
    store.set(f"hocket/host/{rank}", host_identity())
    keys = [f"hocket/host/{r}" for r in range(size)]
    store.wait(keys, timeout)
    found: dict[bytes, list[int]] = {}
    for r, host in enumerate(store.multi_get(keys)):
        found.setdefault(host, []).append(r)
    return list(found.values())


def _all_agree(store: Any, rank: int, size: int, timeout: timedelta, can: bool) -> bool:
    """Return whether every rank of every host can."""
    store.set(f"hocket/can/{rank}", "yes" if can else "no")
    keys = [f"hocket/can/{r}" for r in range(size)]
    store.wait(keys, timeout)
    return all(answer == b"yes" for answer in store.multi_get(keys))
