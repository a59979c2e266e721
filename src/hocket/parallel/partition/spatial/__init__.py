"""Spatial parallelism of any convolutional model: samples divided into shards, whose borders ranks exchange."""

from ._dry_run import dry_run
from ._exchange import LABEL
from ._parallelize import SpatialDecision, SpatialParallel, parallelize

__all__ = ["LABEL", "SpatialDecision", "SpatialParallel", "dry_run", "parallelize"]
