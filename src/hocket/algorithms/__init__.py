"""Collective algorithms, one file each: a builder of schedules with its closed form. Read `_ring.py` first.

`_algorithm.py` says what an algorithm is, `_registry.py` lists all, `_steps.py` has what they share,
`_choices.py` picks one. numpy, `hocket.schedule` and `hocket.units` are all that is used here.
"""

from ._aggregation_tree import aggregation_tree, cluster_tree, switch_tree
from ._algorithm import Algorithm, ClosedForm
from ._all_to_all import bruck, pairwise
from ._binomial import binomial
from ._chain import chain
from ._choice import Choice, parse_spelled
from ._choices import Choices
from ._choices_file import from_toml, to_toml
from ._circulant import circulant
from ._direct import direct, one_shot
from ._dissemination import dissemination
from ._double_tree import double_tree, double_tree_parents
from ._halving_doubling import halving_doubling
from ._hdrm import hdrm, hdrm_places
from ._hierarchical import leaders, rails
from ._recursive_doubling import recursive_doubling
from ._registry import REGISTRY, algorithms, candidates, get, planned
from ._ring import ring
from ._scatter_gather import scatter_gather
from ._torus import torus

__all__ = [
    "REGISTRY", "Algorithm", "Choice", "Choices", "ClosedForm", "aggregation_tree", "algorithms", "binomial", "bruck",
    "candidates", "chain", "circulant", "cluster_tree", "direct", "dissemination", "double_tree", "double_tree_parents",
    "from_toml", "get", "halving_doubling", "hdrm", "hdrm_places", "leaders", "one_shot", "pairwise", "parse_spelled",
    "planned", "rails", "recursive_doubling", "ring", "scatter_gather", "switch_tree", "to_toml", "torus",
]  # fmt: skip
