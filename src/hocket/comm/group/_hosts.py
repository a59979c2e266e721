"""Chooses the transport of a group: one host, several hosts with several ranks each, or an engine for all."""

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from .. import torch_adapter as c10d
from ..aggregated import open_beside_aggregator
from ..engines import EnginePointToPoint, EngineTransport, Gloo, connect_directly, unanswered, unheard
from ..p2p import HostMessages, TagMatcher, publish_streams
from ..scheduled import (
    RAILS_NBYTES,
    CheckedTransport,
    EarlyPoints,
    FlatFrames,
    PointToPoint,
    ScheduledTransport,
    Subset,
    TwoLevelFrames,
    TwoLevelTransport,
    frame_capacity,
    frame_peers,
    host_name,
)
from ..shm import Channel, Liveness, SharedMemoryTransport, host_identity
from ..shm import bootstrap as _bootstrap
from ..transport import CollectiveTimeoutError, CommError, Membership, PeerDiedError, Transport

log = logging.getLogger("hocket.comm")

_FRAMES_TAG: Final = 0x40_0001
_AGREEMENT_TAG: Final = 0x40_0002
_PATIENCE: Final = timedelta(seconds=3)  # for ranks to come to make a group, before others look whether they have died
_LOOK_S: Final = 0.2
_GRACE_S: Final = 1.0
_ANSWER_S: Final = 3.0  # for the store
_UNANSWERED_S: Final = 8.0  # for other hosts to answer, before this rank says that they do not
_DEAD: Final = b"died"
_DIED: Final = "hocket/died"
_FAILED: Final = "hocket/failed"

T = TypeVar("T")


class Opened(NamedTuple):
    """What serves a group."""

    transport: Transport  # transport of the group's collectives
    channel: Channel | None  # the meeting place of this host's ranks, if it has one
    matcher: TagMatcher | HostMessages | None  # what sends and receives; None in a group of one


def open_transport(at: Membership, gloo: Gloo, hosts: Sequence[Sequence[int]], called: Sequence[str]) -> Opened:
    """Open what serves the ranks of a group best on the `hosts` where they run; all come to the same answer.

    `called` is how messages call each rank.
    """
    name, rank, size = at.name, at.rank, at.size
    flat = EngineTransport(gloo, "gloo")
    if size == 1:
        return Opened(flat, None, None)
    points = EarlyPoints(EnginePointToPoint(gloo, "gloo"))
    scheduled: Transport = ScheduledTransport(points, rank, size, flat)

    def checked() -> Transport:
        announcing = _announcing(gloo, at, range(size))
        frames = FlatFrames(announcing, rank, size, frame_capacity(size))
        path = f"{announcing.name} one_shot"
        return CheckedTransport(scheduled, points, frames, at, called, rank, path)

    messages = HostMessages(gloo, at, called)
    mine = next(ranks for ranks in hosts if rank in ranks)
    gloo.loopback = len(hosts) == 1
    if len(hosts) > 1:
        gloo.connect()
    if len({len(ranks) for ranks in hosts}) > 1 or len(mine) == 1:
        log.debug("group %s: hosts with %s ranks; schedules over gloo", name, [len(ranks) for ranks in hosts])
        return Opened(open_beside_aggregator(checked(), at, list(range(size))), None, messages)
    local = mine.index(rank)
    numbers = [at.numbers[r] for r in mine]
    store = at.store if len(hosts) == 1 else c10d.PrefixStore(f"host-{mine[0]}/", at.store)
    streams = publish_streams(store, local, len(mine)) if len(hosts) == 1 else None  # known before anyone goes on
    channel = _bootstrap.connect(at._replace(store=store, rank=local, size=len(mine), numbers=numbers))
    if streams is not None and channel is not None:
        streams.map_all()
    if not _all_agree(at, channel is not None):
        gloo.connect()
        return Opened(checked(), None, messages)
    assert channel is not None
    inside = SharedMemoryTransport(channel)
    if streams is not None:
        matcher = TagMatcher(streams, name, tuple(numbers), at.timeout.total_seconds(), channel.check)
        return Opened(inside, channel, matcher)
    rail = [ranks[local] for ranks in hosts]
    between: Transport = ScheduledTransport(Subset(points, rail), rail.index(rank), len(rail), flat)
    # An agreement may be about the operation before, whose tag is not this one's, and be made beside another.
    agreeing = Subset(EnginePointToPoint(gloo, "gloo", _AGREEMENT_TAG), rail)
    agreement: Transport = ScheduledTransport(agreeing, rail.index(rank), len(rail), flat)
    beside = open_beside_aggregator(between, at, rail, agreement)
    two_level: Transport = TwoLevelTransport(hosts, rank, inside, beside, scheduled)
    announcing = _announcing(gloo, at, [ranks[0] for ranks in hosts])
    frames = TwoLevelFrames(hosts, rank, inside, announcing, frame_capacity(size, local=len(mine)))
    # An aggregator compares what reaches it. Ranks of one host that differ see it before they come there, and go on to
    # the next operation, which those of another host would take for this one.
    plain = beside is between
    two_level = CheckedTransport(
        two_level, points, frames, at, called, mine[0], f"shm + {announcing.name} one_shot",
        RAILS_NBYTES if plain else None, fuses=plain,
    )  # fmt: skip
    return Opened(two_level, channel, messages)


def _announcing(gloo: Gloo, at: Membership, members: Sequence[int]) -> PointToPoint:
    """Return what some ranks of the group, numbered in their order, exchange frames by; all ranks take part."""
    number = members.index(at.rank) if at.rank in members else None
    peers = {members[one] for one in frame_peers(number, len(members))} if number is not None else ()
    direct = connect_directly(at.store, at.rank, at.size, peers, gloo.address, at.timeout)
    if direct is None:
        return Subset(EnginePointToPoint(gloo, "gloo", _FRAMES_TAG), members)
    gloo.beside = direct
    return Subset(direct, members)


def find_hosts(
    at: Membership, dead: Callable[[], set[int]] | None
) -> tuple[list[list[int]], list[str], dict[int, int]]:
    """Return the ranks of each host, how messages call each rank, and the processes of this host's ranks.

    Hosts are in the order of their first ranks. `dead` returns the numbers in the world of ranks that are known to have
    ended; None if there is no world yet.

    Raises:
        PeerDiedError: a rank has ended before it came to make the group.
        CollectiveTimeoutError: some ranks have not come to make the group, or this one has come too late.
    """
    store, name, rank, size, timeout, global_ranks = at
    store.set(f"hocket/host/{rank}", f"{host_identity()}\n{host_name()}\n{os.getpid()}")
    keys = [f"hocket/host/{r}" for r in range(size)]
    begin_s = time.monotonic()

    def tell(dead: Callable[[], set[int]]) -> None:
        gone = dead()
        for key, number in zip(keys, global_ranks, strict=True):
            if number in gone and not store.check([key]):
                store.set(key, _DEAD)  # for those, too, who have no connection to it

    try:
        if dead is None:
            c10d.wait_for(store, keys, timeout)
        else:
            _wait_and_look(store, keys, timeout, partial(tell, dead))
    except Exception as error:
        waited_s = time.monotonic() - begin_s
        where = f"rank {global_ranks[rank]} cannot make group {name!r}: the store where its ranks meet"
        if waited_s < timeout.total_seconds() / 2:  # the store itself is gone
            raise CommError(f"{where} failed: {error}") from error
        try:
            late = c10d.ask(lambda: tuple(r for r in range(size) if not store.check([keys[r]])), _ANSWER_S)
        except TimeoutError:
            raise CommError(f"{where} does not answer; rank 0's process, or the launcher's, may be stopped") from error
        if late:
            store.set(keys[rank], "")  # who comes now need not wait for this rank
            waited = f"waited {waited_s:.0f} s to make group {name!r}: not arrived:"
            raise _late(f"rank {global_ranks[rank]} {waited}", late, global_ranks) from error
    values = store.multi_get(keys)
    if _DEAD in values:
        r = values.index(_DEAD)
        raise PeerDiedError(
            f"rank {global_ranks[r]} died or left before it came to make group {name!r}, for which rank "
            f"{global_ranks[rank]} waited", r, (global_ranks[r],),
        )  # fmt: skip
    if left := tuple(r for r, value in enumerate(values) if not value):
        raise _late(f"rank {global_ranks[rank]} came too late to make group {name!r}, given up by", left, global_ranks)
    found: dict[str, list[int]] = {}
    called, processes = [], {}
    for r, value in enumerate(values):
        identity, host, process = value.decode().split("\n")
        found.setdefault(identity, []).append(r)
        called.append(f"rank {global_ranks[r]} (host {host})")
        if identity == host_identity():
            processes[r] = int(process)
    return list(found.values()), called, processes


def while_all_live(
    make: Callable[[], T], at: Membership, processes: Mapping[int, int], dead: Callable[[], set[int]] | None
) -> T:
    """Return what `make` returns, which waits for the other ranks; it runs in a thread, and this one looks meanwhile.

    Ranks see by the `processes` of their host, or by their connections in the world (`dead`, as for `find_hosts`), that
    one has died, and tell the others in the store, as who fails does. All have come, so that nobody waits for longer
    than the time-out: torch waits without end where the store has gone.

    Raises:
        PeerDiedError: a rank has died before all had made the group.
        CommError: an engine could not connect the ranks, here or elsewhere.
    """
    store, name, rank, _, timeout, global_ranks = at
    where, said = f"rank {global_ranks[rank]} cannot make group {name!r}", ""
    living, lost = Liveness(), set[int]()
    beside: Any = None  # a store of one connection answers one thread at a time

    def look() -> None:
        try:
            c10d.ask(look_there, _ANSWER_S)
        except CommError:
            raise
        except Exception as trouble:  # the store is gone or stands still, or is a program's own, which has no clone
            log.debug("group %s: the store does not tell who has died: %s", name, trouble)

    def look_there() -> None:
        nonlocal beside
        beside = beside or store.clone()
        ended = dead() if dead is not None else ()
        gone = lost | living.ranks() | {r for r, number in enumerate(global_ranks) if number in ended}
        if gone and not beside.check([_DIED]):  # who ends because of another comes later
            beside.set(_DIED, str(min(gone)))
        if beside.check([_DIED]):
            r = int(beside.get(_DIED))
            raise PeerDiedError(
                f"rank {global_ranks[r]} died while rank {global_ranks[rank]} made group {name!r} with it",
                r,
                (global_ranks[r],),
            )
        if not said and beside.check([_FAILED]):
            raise CommError(f"{where}, since {beside.get(_FAILED).decode()}")

    try:
        for r, process in processes.items():
            if r != rank:
                try:
                    living.watch(r, process)
                except ProcessLookupError:
                    lost.add(r)
                except OSError as error:
                    log.debug("group %s: rank %d cannot be watched: %s", name, r, error)
        made = c10d.begun(make)
        begin_s = time.monotonic()
        look_s, end_s = (begin_s + _PATIENCE.total_seconds() + more for more in (0.0, timeout.total_seconds()))
        warn_s = begin_s + _UNANSWERED_S
        while not wait([made], _LOOK_S).done:
            now_s = time.monotonic()
            why = unanswered() if now_s > min(warn_s, end_s) else ""
            if now_s > end_s:
                why = why or unheard() or "others may say why"
                raise CommError(f"{where}: after {now_s - begin_s:.0f} s not all ranks are connected; {why}")
            if now_s > warn_s:
                warn_s = math.inf if why else now_s + _UNANSWERED_S
                if why:
                    log.warning("hocket: rank %d waits to make group %r: %s", global_ranks[rank], name, why)
            if time.monotonic() > look_s:
                look()
        trouble = made.exception()
        if isinstance(trouble, RuntimeError | OSError) and not isinstance(
            trouble, CollectiveTimeoutError | PeerDiedError
        ):
            said = str(trouble) if isinstance(trouble, CommError) else f"{where}: {trouble}"
            with contextlib.suppress(Exception):  # the store is gone
                c10d.ask(lambda: store.clone().set(_FAILED, said), _ANSWER_S)
            # A connection ends before the process does; and others who have not begun to look would not find the store.
            end_s = max(time.monotonic(), look_s) + _GRACE_S
            while time.monotonic() < end_s:
                look()
                time.sleep(_LOOK_S)
            if not isinstance(trouble, CommError):
                raise CommError(said) from trouble
        return made.result()
    finally:
        living.close()


def _wait_and_look(store: Any, keys: list[str], timeout: timedelta, look: Callable[[], None]) -> None:
    """Wait for keys of a store as `c10d.wait_for` does; after some seconds `look` again and again meanwhile."""
    begin_s = time.monotonic()
    try:
        c10d.wait_for(store, keys, min(timeout, _PATIENCE))
    except Exception:  # not again and again: torch's store prints two lines for each wait that ends so
        waited = timedelta(seconds=time.monotonic() - begin_s)
        if waited < _PATIENCE / 2 or waited >= timeout:  # the store is gone, or the time is over
            raise
        while not store.check(keys):
            if time.monotonic() - begin_s > timeout.total_seconds():
                raise
            look()
            time.sleep(_LOOK_S)


def _late(text: str, ranks: tuple[int, ...], global_ranks: Sequence[int]) -> CollectiveTimeoutError:
    numbers = tuple(global_ranks[r] for r in ranks)
    return CollectiveTimeoutError(
        f"{text} rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, numbers))}", ranks, numbers
    )


def _all_agree(at: Membership, can: bool) -> bool:
    """Return whether every rank of every host can."""
    at.store.set(f"hocket/can/{at.rank}", "yes" if can else "no")
    keys = [f"hocket/can/{r}" for r in range(at.size)]
    c10d.wait_for(at.store, keys, at.timeout)
    return all(answer == b"yes" for answer in at.store.multi_get(keys))
