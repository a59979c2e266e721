"""Clusters described: devices, hosts, NICs, switches and links, with routes, units, files and a catalogue.

`load("lassen")`, `load("bigraph:upper=4,ports=2")` and `load("mine.toml")` make a `Cluster`; simulator, planner,
algorithms and fabric read it.
"""

from ._catalogue import CATALOGUE as CATALOGUE
from ._catalogue import load as load
from ._catalogue import preset as preset
from ._catalogue import preset_text as preset_text
from ._cluster import KINDS as KINDS
from ._cluster import ROUTINGS as ROUTINGS
from ._cluster import Cluster as Cluster
from ._cluster import Reduction as Reduction
from ._document import build as build
from ._document import from_spec as from_spec
from ._document import from_toml as from_toml
from ._document import to_toml as to_toml
from ._draw import describe as describe
from ._draw import draw_svg as draw_svg
from ._errors import ClusterError as ClusterError
from ._measured import MeasuredRank as MeasuredRank
from ._measured import PingFit as PingFit
from ._measured import fit_ping as fit_ping
from ._measured import from_measurements as from_measurements
from ._routes import Routes as Routes
from ._servers import SERVERS as SERVERS
from ._topologies import TOPOLOGIES as TOPOLOGIES
from ._tree import AggregationTree as AggregationTree
from ._tree import aggregation_tree as aggregation_tree

__all__ = [
    "CATALOGUE",
    "KINDS",
    "ROUTINGS",
    "SERVERS",
    "TOPOLOGIES",
    "AggregationTree",
    "Cluster",
    "ClusterError",
    "MeasuredRank",
    "PingFit",
    "Reduction",
    "Routes",
    "aggregation_tree",
    "build",
    "describe",
    "draw_svg",
    "fit_ping",
    "from_measurements",
    "from_spec",
    "from_toml",
    "load",
    "preset",
    "preset_text",
    "to_toml",
]
