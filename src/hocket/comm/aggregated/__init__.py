"""Collectives through an aggregator: the client's side."""

from ._aggregated import AggregatedTransport as AggregatedTransport
from ._aggregated import locate_by_gathering as locate_by_gathering
from ._agreement import AggregationStats as AggregationStats
from ._agreement import aggregation_stats as aggregation_stats
from ._discovery import leave_aggregator as leave_aggregator
from ._discovery import open_beside_aggregator as open_beside_aggregator
from ._wire_types import wire_element as wire_element

__all__ = [
    "AggregatedTransport",
    "AggregationStats",
    "aggregation_stats",
    "open_beside_aggregator",
    "leave_aggregator",
    "locate_by_gathering",
    "wire_element",
]
