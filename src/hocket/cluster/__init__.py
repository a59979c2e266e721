"""Clusters described: devices, hosts, NICs, switches and links, with routes, units, files and a catalogue.

`load("lassen")`, `load("bigraph:upper=4,ports=2")` and `load("mine.toml")` make a `Cluster`; simulator, planner,
algorithms and fabric read it.
"""

from ._catalogue import CATALOGUE, load, preset, preset_text
from ._cluster import KINDS, ROUTINGS, Cluster, Reduction
from ._document import build, from_spec, from_toml, to_toml
from ._draw import describe, draw_svg
from ._errors import ClusterError
from ._measured import MeasuredRank, PingFit, fit_ping, from_measurements
from ._routes import Routes
from ._servers import SERVERS
from ._topologies import TOPOLOGIES
from ._tree import AggregationTree, aggregation_tree

__all__ = [
    "CATALOGUE", "KINDS", "ROUTINGS", "SERVERS", "TOPOLOGIES", "AggregationTree", "Cluster", "ClusterError",
    "MeasuredRank", "PingFit", "Reduction", "Routes", "aggregation_tree", "build", "describe", "draw_svg", "fit_ping",
    "from_measurements", "from_spec", "from_toml", "load", "preset", "preset_text", "to_toml",
]  # fmt: skip
