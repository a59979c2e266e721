"""Clusters that are known by name; their TOML files stand in `presets/`, with the source of every figure."""

import functools
import os
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from ._cluster import Cluster
from ._document import from_spec, from_toml, read
from ._errors import ClusterError
from ._topologies import TOPOLOGIES

CATALOGUE = (
    "b200-like", "closet", "eflops-like", "h100-like", "h200-like", "laptop", "lassen", "mi300x-like", "selene-like",
    "sharp-1500", "summit",
)  # fmt: skip
"""The names, in order."""


def preset_text(name: str) -> str:
    """Return the TOML document of a cluster of the catalogue, with its comments.

    Raises:
        ClusterError: if there is none of this name.
    """
    if name not in CATALOGUE:
        raise ClusterError(f"the catalogue has no {name!r}; it has {', '.join(CATALOGUE)}")
    return (files(__package__) / "presets" / f"{name}.toml").read_text(encoding="utf-8")


@functools.lru_cache(maxsize=4)  # of 16,384 devices one takes a fourth of a second, and looking at it as long again
def preset(name: str) -> Cluster:
    """Return a cluster of the catalogue; the same one each time, since nobody can change it.

    Raises:
        ClusterError: if there is none of this name.
    """
    return from_toml(preset_text(name))


def load(text: str) -> Cluster:
    """Return the cluster that is meant.

    Args:
        text: A name of the catalogue (`lassen`), a spec (`star:hosts=8,bandwidth=100Gbit/s`), or a TOML file's path.

    Raises:
        ClusterError: if it is none of them, or what it describes is wrong.
    """
    if text in CATALOGUE:
        return preset(text)
    if text.partition(":")[0] in TOPOLOGIES:
        return from_spec(text)
    if text.endswith(".toml") or os.path.isfile(text):  # unlike Path's, no error where the text is too long for a name
        return read(Path(text))
    known = [*CATALOGUE, *TOPOLOGIES]
    near = get_close_matches(text.partition(":")[0], known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ClusterError(
        f"{text!r} is no cluster{hint} Give a name of the catalogue ({', '.join(CATALOGUE)}), a spec such as "
        f"star:hosts=8 ({', '.join(TOPOLOGIES)}), or the path of a .toml file"
    )
