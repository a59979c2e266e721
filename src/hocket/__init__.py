"""Hocket trains on many devices the model that you have written for one.

Everything public is reached from here, and loaded when it is first used: importing this package costs a few
milliseconds and does not import torch.
"""

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket import (
        aggregator,
        algorithms,
        calibrate,
        cluster,
        comm,
        explain,
        fabric,
        integrations,
        keras,
        launch,
        optim,
        parallel,
        planner,
        profile,
        schedule,
        sharding,
        simulate,
        testing,
        timeline,
        units,
        workload,
        workloads,
    )
    from hocket.parallel import Trainer, average, deferred, distribute, own, read_state_dict, resume, shard, total
    from hocket.planner import Plan

__version__ = "0.1.0.dev0"

__all__ = [
    "Plan", "Trainer", "__version__", "aggregator", "algorithms", "average", "calibrate", "cluster", "comm",
    "deferred", "distribute", "explain", "fabric", "integrations", "keras", "launch", "optim", "own", "parallel",
    "planner", "profile", "read_state_dict", "resume", "schedule", "shard", "sharding", "simulate", "testing",
    "timeline", "total", "units", "workload", "workloads",
]  # fmt: skip

_HOMES = {
    "Plan": "hocket.planner",
    **dict.fromkeys(
        ("Trainer", "average", "deferred", "distribute", "own", "read_state_dict", "resume", "shard", "total"),
        "hocket.parallel",
    ),
}
_PACKAGES = frozenset(__all__) - _HOMES.keys() - {"__version__"}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for (PEP 562)."""
    if name in _PACKAGES:
        try:
            return importlib.import_module(f"hocket.{name}")  # the import system sets the attribute by itself
        except ImportError as error:  # `help(hocket)` asks for all, also for `keras` without Keras
            raise AttributeError(str(error)) from error
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'hocket' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _register_with_torch() -> None:
    """Make backend "hocket" known to a torch that was imported before us.

    A torch imported later finds us by its entry point; this is for one whose autoload is switched off, or which
    runs from a source tree where no entry point is installed. Registering twice does nothing. An import must
    never fail for it, and it must not be an `import` statement: importing hocket.comm is not light.
    """
    try:
        importlib.import_module("hocket.comm.autoload").register()
    except Exception as error:
        warnings.warn(f'hocket could not register its torch backend "hocket": {error!r}', RuntimeWarning, stacklevel=2)


if "torch" in sys.modules:
    _register_with_torch()
