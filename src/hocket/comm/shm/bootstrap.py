"""How the ranks of a group find out, through the group's store, whether shared memory can serve all of them."""

import functools
import json
import logging
import os

from .. import torch_adapter
from ..transport import Membership
from . import kernel as _kernel
from ._channel import SEGMENT_NBYTES, Channel
from ._peers import Peer
from ._segment import Address, SharedSegment, host_identity, nonce

log = logging.getLogger("hocket.comm")

_process_nonce = 0
_process_pid = 0


def process_nonce() -> int:
    """Return a number that no other process has, by which a mapping of its memory can be checked."""
    global _process_nonce, _process_pid
    if _process_pid != os.getpid():
        _process_nonce, _process_pid = nonce(), os.getpid()
    return _process_nonce


def connect(at: Membership) -> Channel | None:
    """Open the channel of a group if all its ranks run on this host and can map each other's memory.

    All ranks come to the same answer: each publishes what it found, and one refusal is enough for None.
    """
    store, name, rank, size, timeout, global_ranks = at
    segment, problem = None, None
    mine: dict[str, object] = {"host": None}
    if os.environ.get("HOCKET_SHARED_MEMORY", "1") == "0":
        problem = "HOCKET_SHARED_MEMORY=0"
    elif not _kernel.supported():
        problem = "this processor or system is not supported"
    else:
        try:
            segment = SharedSegment.create(f"group-{name}", SEGMENT_NBYTES)
            segment.mark(process_nonce())
            mine = {"host": host_identity(), "pid": os.getpid(), "fd": segment.fd, "nonce": process_nonce()}
        except OSError as error:
            problem = f"no shared memory: {error}"
    store.set(f"hocket/shm/{rank}", json.dumps(mine))
    keys = [f"hocket/shm/{r}" for r in range(size)]
    torch_adapter.wait_for(store, keys, timeout)
    peers: list[Peer] = []
    if problem is None and segment is not None:
        infos = [json.loads(raw) for raw in store.multi_get(keys)]
        try:
            for r, info in enumerate(infos):
                if info["host"] != mine["host"]:
                    problem = f"rank {global_ranks[r]} runs on another host or in another process namespace"
                    break
                peers.append(_attach(r, info, segment if r == rank else None))
        except (OSError, ValueError) as error:
            problem = f"rank {rank} cannot map the memory of rank {len(peers)}: {error}"
    store.set(f"hocket/shm/{rank}/verdict", problem or "ok")
    verdicts = [f"hocket/shm/{r}/verdict" for r in range(size)]
    torch_adapter.wait_for(store, verdicts, timeout)
    refusals = [v.decode() for v in store.multi_get(verdicts) if v != b"ok"]
    if segment is not None:
        segment.close()  # mapped by everyone by now
    if refusals:
        log.debug("group %s uses its engine, not shared memory: %s", name, refusals[0])
        return None
    return Channel(name, rank, peers, global_ranks)


def _attach(rank: int, info: dict[str, int], own: SharedSegment | None) -> Peer:
    if own is not None:
        return Peer(rank, info["pid"], info["nonce"], own, -1)
    segment = SharedSegment.attach(Address(info["pid"], info["fd"], SEGMENT_NBYTES), info["nonce"])
    return Peer(rank, info["pid"], info["nonce"], segment, _watch(info["pid"], info["nonce"]))


@functools.cache
def _watch(pid: int, nonce: int) -> int:
    """Return a descriptor that becomes readable when the process ends; one a peer, whatever the number of groups."""
    return os.pidfd_open(pid)
