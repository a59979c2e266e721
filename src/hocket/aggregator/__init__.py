"""Aggregation inside the network: a server that reduces what its children send, its protocol, and a client."""

from ._arithmetic import fold as fold
from ._client import AggregationClient as AggregationClient
from ._client import wait_for_all as wait_for_all
from ._errors import AggregationError as AggregationError
from ._errors import AggregatorLostError as AggregatorLostError
from ._errors import GroupFailedError as GroupFailedError
from ._frames import FailCode as FailCode
from ._frames import Level as Level
from ._kinds import ElementType as ElementType
from ._kinds import Kind as Kind
from ._kinds import Operator as Operator
from ._membership import AggregationGroup as AggregationGroup
from ._membership import AggregationWork as AggregationWork
from ._membership import segment_nbytes as segment_nbytes
from ._server import Aggregator as Aggregator
from ._settings import AddressError as AddressError
from ._settings import Limits as Limits
from ._settings import TokenError as TokenError
from ._settings import parse_address as parse_address
from ._settings import read_tokens as read_tokens
from ._stats import Stats as Stats

__all__ = [
    "AddressError",
    "AggregationClient",
    "AggregationError",
    "AggregationGroup",
    "AggregationWork",
    "Aggregator",
    "AggregatorLostError",
    "ElementType",
    "FailCode",
    "GroupFailedError",
    "Kind",
    "Level",
    "Limits",
    "Operator",
    "Stats",
    "TokenError",
    "fold",
    "parse_address",
    "read_tokens",
    "segment_nbytes",
    "wait_for_all",
]
