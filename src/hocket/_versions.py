"""Which versions must be alike on all hosts of a job, as random numbers and results may differ otherwise."""

import sys
from collections.abc import Callable


def versions(version_of: Callable[[str], str | None]) -> dict[str, str | None]:
    """Return the versions of what computes; None for what is not there.

    Args:
        version_of: Returns the version of a library: of what is installed, or of what is loaded.
    """
    python = ".".join(map(str, sys.version_info[:3]))
    return {"Python": python, **{name: version_of(name) for name in ("torch", "hocket", "numpy")}}
