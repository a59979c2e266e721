"""Versions of libraries, and which must be alike on all hosts of a job: else random numbers and results may differ."""

import importlib.metadata
import sys
from collections.abc import Callable


def versions(version_of: Callable[[str], str | None]) -> dict[str, str | None]:
    """Return the versions of what computes; None for what is not there.

    Args:
        version_of: Returns the version of a library: of what is installed, or of what is loaded.
    """
    python = ".".join(map(str, sys.version_info[:3]))
    return {"Python": python, **{name: version_of(name) for name in ("torch", "hocket", "numpy")}}


def installed(name: str) -> str | None:
    """Return the version of what is installed, which is not imported for that; None for what is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # or run from a source tree
        return None
