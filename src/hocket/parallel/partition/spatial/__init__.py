"""Spatial parallelism of any convolutional model: samples cut into slabs, whose borders ranks exchange."""

from ._dry_run import dry_run as dry_run
from ._exchange import LABEL as LABEL
from ._parallelize import Decision as Decision
from ._parallelize import SpatialParallel as SpatialParallel
from ._parallelize import parallelize as parallelize
from ._slabs import Slabs as Slabs
from ._slabs import Window as Window
from ._slabs import halo_nbytes as halo_nbytes
from ._slabs import halo_rows as halo_rows

__all__ = [
    "LABEL",
    "Decision",
    "SpatialParallel",
    "Slabs",
    "Window",
    "dry_run",
    "halo_nbytes",
    "halo_rows",
    "parallelize",
]
