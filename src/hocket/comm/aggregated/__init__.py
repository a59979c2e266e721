"""Collectives through an aggregator: the client's side."""

from ._aggregated import AggregatedTransport, locate_by_gathering
from ._agreement import AggregationStats, aggregation_stats
from ._discovery import leave_aggregator, open_beside_aggregator
from ._wire_types import wire_element

__all__ = [
    "AggregatedTransport", "AggregationStats", "aggregation_stats", "leave_aggregator", "locate_by_gathering",
    "open_beside_aggregator", "wire_element",
]  # fmt: skip
