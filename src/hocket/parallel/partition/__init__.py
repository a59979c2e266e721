"""Tensors divided among ranks: layers (tensor parallelism) and samples (spatial parallelism)."""

from .spatial import dry_run

DRY_RUNS = {"spatial": dry_run}
"""By the name of an axis, how a model does one rank's part alone; see `hocket.workload.capture`."""

__all__ = ["DRY_RUNS"]
