"""Collective algorithms, one file each: a builder of schedules with its closed form. Read `_ring.py` first.

`_algorithm.py` says what an algorithm is, `_registry.py` lists all, `_steps.py` has what they share,
`_choices.py` picks one. numpy, `hocket.schedule` and `hocket.units` are all that is used here.
"""

from ._aggregation_tree import aggregation_tree as aggregation_tree
from ._aggregation_tree import cluster_tree as cluster_tree
from ._aggregation_tree import switch_tree as switch_tree
from ._algorithm import Algorithm as Algorithm
from ._algorithm import ClosedForm as ClosedForm
from ._all_to_all import bruck as bruck
from ._all_to_all import pairwise as pairwise
from ._binomial import binomial as binomial
from ._chain import chain as chain
from ._choice import Choice as Choice
from ._choice import parse_spelled as parse_spelled
from ._choices import Choices as Choices
from ._choices_file import from_toml as from_toml
from ._choices_file import to_toml as to_toml
from ._circulant import circulant as circulant
from ._direct import direct as direct
from ._direct import one_shot as one_shot
from ._dissemination import dissemination as dissemination
from ._double_tree import double_tree as double_tree
from ._double_tree import double_tree_parents as double_tree_parents
from ._halving_doubling import halving_doubling as halving_doubling
from ._hdrm import hdrm as hdrm
from ._hdrm import hdrm_places as hdrm_places
from ._hierarchical import leaders as leaders
from ._hierarchical import rails as rails
from ._recursive_doubling import recursive_doubling as recursive_doubling
from ._registry import REGISTRY as REGISTRY
from ._registry import algorithms as algorithms
from ._registry import candidates as candidates
from ._registry import get as get
from ._registry import planned as planned
from ._ring import ring as ring
from ._scatter_gather import scatter_gather as scatter_gather
from ._torus import torus as torus

__all__ = [
    "REGISTRY",
    "Algorithm",
    "Choice",
    "Choices",
    "ClosedForm",
    "aggregation_tree",
    "algorithms",
    "binomial",
    "bruck",
    "candidates",
    "chain",
    "circulant",
    "cluster_tree",
    "direct",
    "dissemination",
    "double_tree",
    "double_tree_parents",
    "from_toml",
    "get",
    "halving_doubling",
    "hdrm",
    "hdrm_places",
    "leaders",
    "one_shot",
    "parse_spelled",
    "pairwise",
    "planned",
    "rails",
    "recursive_doubling",
    "ring",
    "scatter_gather",
    "switch_tree",
    "to_toml",
    "torus",
]
