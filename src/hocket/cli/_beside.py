"""Whether others computed on this machine while a model was measured, which makes its times too long."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

_SOME = 0.25  # cores that are missing, from which on it is said
_LEAST_S = 0.3  # that are measured; the kernel counts in hundredths of a second of each core


def watch_for_others() -> Callable[[], float]:
    """Begin to watch the machine, and return what says on stderr if others took cores that torch's threads want.

    It returns how many they took; 0 where it says nothing.
    """
    import torch

    machine, own, begun = _machine_s(), _own_s(), time.monotonic()

    def tell() -> float:
        lasted = time.monotonic() - begun
        if machine is None or lasted < _LEAST_S or (now := _machine_s()) is None:
            return 0.0
        cores, threads = os.cpu_count() or 1, torch.get_num_threads()
        others = (now - machine - (_own_s() - own)) / lasted
        if min(others, others + threads - cores) <= _SOME:
            return 0.0
        here = f"{threads} thread{'s' if threads > 1 else ''} here"
        print(
            f"hocket: others computed on this machine while the model was measured (on {others:.1f} of {cores} "
            f"cores, beside {here}): its times may be far too long, and what is predicted of them; ask again when "
            "they are done, or say --device meta, which measures nothing",
            file=sys.stderr,
        )
        return others

    return tell


def _machine_s() -> float | None:
    """Return seconds that all processes have computed on this machine's cores; None where nothing tells them."""
    with suppress(OSError, ValueError, IndexError), open("/proc/stat", encoding="ascii") as file:
        user, nice, system = (int(word) for word in file.readline().split()[1:4])
        return (user + nice + system) / os.sysconf("SC_CLK_TCK")
    return None


def _own_s() -> float:
    """Return seconds that this process and those it has started, and that are over, have computed."""
    return sum(os.times()[:4])
