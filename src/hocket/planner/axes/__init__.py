"""The axes of parallelism, one file each, and the table of them: `_axis.py` says what one is, `_table.py` lists all."""

from ._axis import Axis, Divides
from ._table import AXES, axis, copy_group, inner, others, product, replicas, shard_group, sharing

__all__ = [
    "AXES", "Axis", "Divides", "axis", "copy_group", "inner", "others", "product", "replicas", "shard_group", "sharing",
]  # fmt: skip
