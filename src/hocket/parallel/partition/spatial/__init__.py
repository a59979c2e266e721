"""Spatial parallelism of any convolutional model: samples divided into shards, whose borders ranks exchange."""

from ._dry_run import dry_run as dry_run
from ._exchange import LABEL as LABEL
from ._parallelize import SpatialDecision as SpatialDecision
from ._parallelize import SpatialParallel as SpatialParallel
from ._parallelize import parallelize as parallelize

__all__ = [
    "LABEL",
    "SpatialDecision",
    "SpatialParallel",
    "dry_run",
    "parallelize",
]
