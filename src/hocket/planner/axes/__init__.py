"""The axes of parallelism, one file each, and the table of them: `_axis.py` says what one is, `_table.py` lists all."""

from ._axis import Axis, Divides
from ._table import AXES, axis, inner, others, product, replicas, sharing

__all__ = ["AXES", "Axis", "Divides", "axis", "inner", "others", "product", "replicas", "sharing"]
