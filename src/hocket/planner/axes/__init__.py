"""The axes of parallelism, one file each, and the table of them: `_axis.py` says what one is, `_table.py` lists all."""

from ._axis import Axis as Axis
from ._axis import Divides as Divides
from ._table import AXES as AXES
from ._table import axis as axis
from ._table import inner as inner
from ._table import others as others
from ._table import product as product
from ._table import replicas as replicas
from ._table import sharing as sharing

__all__ = ["AXES", "Axis", "Divides", "axis", "inner", "others", "product", "replicas", "sharing"]
