"""Aggregation inside the network: a server that reduces what its children send, its protocol, and a client."""

from ._arithmetic import fold
from ._client import AggregationClient, wait_for_all
from ._errors import AggregationError, AggregatorLostError, GroupFailedError
from ._frames import FailCode, Level
from ._kinds import ElementType, Kind, Operator
from ._membership import AggregationGroup, AggregationWork, segment_nbytes
from ._server import Aggregator
from ._settings import AddressError, Limits, TokenError, parse_address, read_tokens
from ._stats import Stats

__all__ = [
    "AddressError", "AggregationClient", "AggregationError", "AggregationGroup", "AggregationWork", "Aggregator",
    "AggregatorLostError", "ElementType", "FailCode", "GroupFailedError", "Kind", "Level", "Limits", "Operator",
    "Stats", "TokenError", "fold", "parse_address", "read_tokens", "segment_nbytes", "wait_for_all",
]  # fmt: skip
