"""One word for a cluster: a name of the catalogue, a spec, or the path of a TOML file."""

from difflib import get_close_matches
from pathlib import Path

from ._catalogue import CATALOGUE, preset
from ._cluster import Cluster
from ._document import from_spec, read
from ._errors import ClusterError
from ._topologies import TOPOLOGIES

__all__ = ["load"]


def load(text: str) -> Cluster:
    """The cluster that is meant.

    Args:
        text: A name of the catalogue (`lassen`), a spec (`star:hosts=8,bandwidth=100Gbit/s`), or a TOML file's path.

    Raises:
        ClusterError: if it is none of them, or what it describes is wrong.
    """
    if text in CATALOGUE:
        return preset(text)
    if text.partition(":")[0] in TOPOLOGIES:
        return from_spec(text)
    if text.endswith(".toml") or Path(text).is_file():
        return read(Path(text))
    known = [*CATALOGUE, *TOPOLOGIES]
    near = get_close_matches(text.partition(":")[0], known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ClusterError(
        f"{text!r} is no cluster{hint} Give a name of the catalogue ({', '.join(CATALOGUE)}), a spec such as "
        f"star:hosts=8 ({', '.join(TOPOLOGIES)}), or the path of a .toml file"
    )
