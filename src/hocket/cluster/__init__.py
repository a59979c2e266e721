"""Clusters described: devices, hosts, NICs, switches and links, with routes, units, files and a catalogue.

`load("lassen")`, `load("bigraph:upper=4,ports=2")` and `load("mine.toml")` make a `Cluster`; simulator, planner,
algorithms and fabric read it. Names are loaded when they are first asked for: a rank needs no catalogue.
"""

from typing import TYPE_CHECKING

from hocket._lazy import lazy

if TYPE_CHECKING:
    from ._catalogue import CATALOGUE, load, preset, preset_text
    from ._cluster import FORMAT_RATES, KINDS, ROUTINGS, Cluster, Reduction
    from ._document import build, from_spec, from_toml, to_toml
    from ._draw import describe, draw_svg
    from ._errors import ClusterError
    from ._measured import MeasuredRank, PingFit, fit_ping, from_measurements
    from ._routes import Routes
    from ._servers import SERVERS
    from ._topologies import TOPOLOGIES
    from ._tree import AggregationTree, aggregation_tree

__all__ = [
    "CATALOGUE", "FORMAT_RATES", "KINDS", "ROUTINGS", "SERVERS", "TOPOLOGIES", "AggregationTree", "Cluster",
    "ClusterError", "MeasuredRank", "PingFit", "Reduction", "Routes", "aggregation_tree", "build", "describe",
    "draw_svg", "fit_ping", "from_measurements", "from_spec", "from_toml", "load", "preset", "preset_text", "to_toml",
]  # fmt: skip

__getattr__ = lazy(
    __name__,
    {
        "_catalogue": "CATALOGUE load preset preset_text",
        "_cluster": "FORMAT_RATES KINDS ROUTINGS Cluster Reduction",
        "_document": "build from_spec from_toml to_toml",
        "_draw": "describe draw_svg",
        "_errors": "ClusterError",
        "_measured": "MeasuredRank PingFit fit_ping from_measurements",
        "_routes": "Routes",
        "_servers": "SERVERS",
        "_topologies": "TOPOLOGIES",
        "_tree": "AggregationTree aggregation_tree",
    },
)
