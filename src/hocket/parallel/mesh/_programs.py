"""Whether the ranks of several hosts run one program: its files, and the versions of what computes, are compared once.

Two hosts may have copies of a program, of which one was edited. What ranks compute is put together all the same, and
of a model's `forward`, or a loss function, nothing else would show that it is not the same on all.
"""

import contextlib
import hashlib
import os
import sys
import sysconfig
import weakref
from typing import Any, Final

from hocket._program import warn
from hocket._versions import versions
from hocket.comm import host_identity

from .world import World

_NAMED: Final = 3  # files in a warning
_NAMED_RANKS: Final = 8
_INSTALLED: Final = ("site-packages", "dist-packages")
_BELOW: Final = ("torch", "hocket")
_OF_THE_HOST: Final = ("sitecustomize", "usercustomize")
_looked: "weakref.WeakSet[Any]" = weakref.WeakSet()  # groups


def warn_of_other_programs(world: World) -> None:
    """Warn on rank 0, once for a group, where other hosts run other files or versions; a collective operation."""
    if world.size == 1 or world.group in _looked:
        return
    _looked.add(world.group)
    everyone = world.from_all((host_identity(), versions(_loaded)))
    if len({host for host, _ in everyone}) == 1:
        return
    files = _files()
    first = world.from_root({name: digest for name, (_, digest) in files.items()})
    other = sorted(name for name, (_, digest) in files.items() if first.get(name, digest) != digest)
    differ = world.from_all(other[: _NAMED + 1])
    if world.rank == 0:
        _warn_of_files(differ, {name: path for name, (path, _) in files.items()})
        _warn_of_versions([versions for _, versions in everyone])


def _warn_of_files(differ: list[list[str]], paths: dict[str, str]) -> None:
    names = sorted({name for names in differ for name in names})
    if names:
        files = ", ".join(paths[name] for name in names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        ranks = _ranks([rank for rank, names in enumerate(differ) if names])
        warn(
            f"{files}: {ranks} loaded other contents than rank 0, as hosts have copies that differ; if the program was "
            "edited on one of them, copy it to all: ranks of several programs train what none of these would"
        )


def _warn_of_versions(versions: list[dict[str, str | None]]) -> None:
    for what, here in versions[0].items():
        if other := [rank for rank, one in enumerate(versions) if None not in (here, one[what]) and one[what] != here]:
            warn(
                f"{_ranks(other)} {what} {versions[other[0]][what]}, and rank 0 {here}: install one version on all "
                "hosts, since random numbers and results may differ"
            )


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks[:_NAMED_RANKS]))}{', ...' if len(ranks) > _NAMED_RANKS else ''} have"


def _loaded(name: str) -> str | None:
    version = getattr(sys.modules.get(name), "__version__", None)
    return None if version is None else str(version)  # torch's is more than a text


def _files() -> dict[str, tuple[str, str]]:
    """Return path and digest of the source of each loaded module of the program's own, by the module's name."""
    homes = [sysconfig.get_path("stdlib"), *(os.path.dirname(sys.modules[name].__file__ or "") for name in _BELOW)]
    below = tuple(f"{os.path.realpath(home)}{os.sep}" for home in homes)
    found = {}
    for name, module in sys.modules.copy().items():
        path = getattr(module, "__dict__", {}).get("__file__")  # which makes no lazy module load
        if not isinstance(path, str) or not path.endswith(".py") or name in _OF_THE_HOST:
            continue
        if (real := os.path.realpath(path)).startswith(below) or not set(_INSTALLED).isdisjoint(real.split(os.sep)):
            continue
        with contextlib.suppress(OSError), open(path, "rb") as file:  # not of an archive, nor removed since
            found[name] = path, hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return found
