"""Clusters that are known by name; their TOML files stand in `presets/`, with the source of every figure."""

from importlib.resources import files

from ._cluster import Cluster
from ._document import from_toml
from ._errors import ClusterError

__all__ = ["CATALOGUE", "preset", "preset_text"]

CATALOGUE = ("closet", "eflops-like", "laptop", "lassen", "selene-like", "sharp-1500", "summit")
"""The names, in order."""


def preset_text(name: str) -> str:
    """The TOML document of a cluster of the catalogue, with its comments.

    Raises:
        ClusterError: if there is none of this name.
    """
    if name not in CATALOGUE:
        raise ClusterError(f"the catalogue has no {name!r}; it has {', '.join(CATALOGUE)}")
    return (files(__package__) / "presets" / f"{name}.toml").read_text(encoding="utf-8")


def preset(name: str) -> Cluster:
    """A cluster of the catalogue.

    Raises:
        ClusterError: if there is none of this name.
    """
    return from_toml(preset_text(name))
