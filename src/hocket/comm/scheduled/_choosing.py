"""Which table of choices the executor reads: the user's, a measured one, or closed forms."""

import functools
import os
from pathlib import Path
from typing import Final

from hocket.algorithms import Choices, from_toml
from hocket.schedule import ScheduleError, Wire

# Gloo over a 10 Gbit/s Ethernet: TCP's latency as Gloo's pairs see it, what each further message of a step costs this
# executor, TCP's rate, and torch.add from memory on one core. What differs from it is for `hocket tune` to find out.
ETHERNET: Final = Wire(latency_s=50e-6, seconds_per_byte=1 / 1.1e9, reduce_seconds_per_byte=1 / 8e9, message_s=20e-6)

_chosen: Choices | None = None


def choose(choices: Choices | str | os.PathLike[str] | None) -> None:
    """Say which algorithms this process uses between hosts; on every rank alike.

    Args:
        choices: A table; a text as `Choices.parse` reads it, for example `"all_reduce >=64KiB ring"`; the path of a
            TOML file that `hocket tune` wrote; or None for what HOCKET_CHOICES (text or path) says. Closed forms fill
            what a table leaves open.

    Raises:
        ScheduleError: the text or file is not understood.
    """
    global _chosen
    _chosen = None if choices is None else _read(choices)
    table.cache_clear()


@functools.lru_cache(maxsize=64)
def table(world: int) -> Choices:
    """Return the table for groups of `world` ranks."""
    given = _chosen
    if given is None and (setting := os.environ.get("HOCKET_CHOICES")):
        given = _read(setting)
    default = Choices.by_closed_form(ETHERNET, world)
    return default if given is None else given | default


def _read(choices: Choices | str | os.PathLike[str]) -> Choices:
    if isinstance(choices, Choices):
        return choices
    path = Path(choices)
    if path.suffix == ".toml" or not isinstance(choices, str):
        try:
            return from_toml(path.read_text())
        except OSError as error:
            raise ScheduleError(f"the table of choices {str(path)!r} cannot be read: {error}") from None
    return Choices.parse(choices)
