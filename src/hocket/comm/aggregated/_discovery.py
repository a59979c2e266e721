"""Whether a group has an aggregator: all its ranks must have been told of one. How it gets it, and leaves it."""

import logging
import secrets
from collections.abc import Sequence
from typing import Final

from ..scheduled import CheckedTransport, TwoLevelTransport, host_name
from ..transport import Membership, Transport
from ._aggregated import AggregatedTransport
from ._aggregation_settings import AggregationSettings
from ._session import AggregationSession
from ._tree_position import tree_position

log = logging.getLogger("hocket.comm")

_FAREWELL_S: Final = 2.0


def open_beside_aggregator(
    hosts: Transport,  # transport among `ranks`
    at: Membership,  # the group
    ranks: Sequence[int],  # ranks of the group that take part, in order
    beside: Transport | None = None,  # another transport among `ranks`, that nothing else uses
) -> Transport:
    """`hosts`, with the aggregator that the environment names before it; `hosts` itself if it names none.

    Raises:
        CommError: the environment names one in a way that cannot be used.
    """
    if len(ranks) == 1:
        return hosts
    store, name, rank, _, timeout, global_ranks = at
    settings = AggregationSettings.from_environment()
    mine = "" if settings is None else str(settings)
    keys = [f"hocket/aggregation/{r}" for r in ranks]
    store.set(f"hocket/aggregation/{rank}", f"{secrets.token_hex(8)} {mine}")
    store.wait(keys, timeout)
    nonces, _, addresses = zip(*(text.decode().partition(" ") for text in store.multi_get(keys)), strict=True)
    if settings is None or "" in addresses:
        if any(addresses):
            without = [global_ranks[r] for r, address in zip(ranks, addresses, strict=True) if not address]
            log.warning("group %s does without an aggregator: ranks %s are not told of one", name, without)
        return hosts
    unique = f"{name[-80:]}/{ranks[0]}/{nonces[0]}"
    me = ranks.index(rank)
    session = AggregationSession(settings, unique, tree_position(addresses, me), _label_of(global_ranks[rank]))
    shown = name if len(ranks) == len(global_ranks) else f"{name}, rail of rank {ranks[0]}"
    return AggregatedTransport(session, hosts, me, len(ranks), shown, timeout.total_seconds(), beside)


def leave_aggregator(transport: Transport) -> None:
    """End a group's use of its aggregator, if it has one."""
    inner = transport.inner if isinstance(transport, CheckedTransport) else transport
    inner = inner.between if isinstance(inner, TwoLevelTransport) else inner
    if isinstance(inner, AggregatedTransport):
        try:
            inner.close(_FAREWELL_S)
        except Exception as error:  # others have gone already: nobody is left who could miss a result
            log.debug("%s: %s", inner.agreement.name, error)


def _label_of(global_rank: int) -> str:
    """Return how the aggregator's errors call a rank."""
    return f"rank {global_rank} (host {host_name()})"
