"""Calibrations that are kept in files, and taken again while machine, model and versions are the same.

A file is JSON, so that reading one runs nothing; a file that cannot be read, that was changed, or of another form
counts as none.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hocket._limits import memory, processor, usable_cores
from hocket.parallel.mesh import World
from hocket.planner import Constants, MeasuredPlan, Network, Plan
from hocket.workload import parse

from ._loss import LossOfSample
from ._references import Calibration, counted

VARIABLE = "HOCKET_CALIBRATION"
"""Environment variable: "again" measures although a calibration is kept, "off" keeps and takes none, "keep" keeps one
that was measured while others computed, too."""

_FORM = 7  # of the files
_BUSY = 0.5  # of the cores: more that is wanted by others makes times that are not worth keeping


def key_of(model: torch.nn.Module, optimizer: Any, inputs: Any, world: World) -> str:
    """Return what a calibration depends on, hashed; the same on every rank. A collective operation.

    The machine, memory and threads of every rank, the versions, the form of the model with the source of its classes,
    the optimizer's class and the state that it keeps, plain attributes of the modules, the table of collective
    algorithms that the environment names, and the shapes of the inputs count; values of parameters and data do not.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    machine = [
        platform.node(), processor(), usable_cores(), memory()[0], torch.get_num_threads(), _device(device),
        sys.version, torch.__version__, version("hocket"), os.environ.get("LOCAL_WORLD_SIZE", ""), _choices(),
    ]  # fmt: skip
    classes = {type(module) for module in model.modules()}
    form = [
        repr(model),
        sorted(_source(kind) for kind in classes if not kind.__module__.startswith("torch.")),
        [(name, str(p.dtype), tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()],
        [(name, str(b.dtype), tuple(b.shape)) for name, b in model.named_buffers()],
        [_plain(module) for module in model.modules()],
        f"{type(optimizer).__module__}.{type(optimizer).__qualname__}, with {counted(optimizer)}",
        [len(group["params"]) for group in optimizer.param_groups],
        _shapes(inputs),
    ]
    every = world.from_all([*machine, hashlib.sha256(repr(form).encode()).hexdigest()])
    return hashlib.sha256(repr(every).encode()).hexdigest()


def key_with_loss(key: str, loss_fn: Any) -> str:
    """Return what a calibration depends on whose workload has a loss: its source, or its class and settings."""
    return hashlib.sha256(repr((key, _named(loss_fn))).encode()).hexdigest()


def _named(function: Any) -> Any:
    if isinstance(function, LossOfSample):
        return _named(function.loss)
    if isinstance(function, torch.nn.Module):
        return repr(function), _source(type(function)), _plain(function)
    if isinstance(function, functools.partial):
        return _named(function.func), repr(function.args), repr(sorted(function.keywords.items()))
    return _source(function) if hasattr(function, "__qualname__") else _source(type(function))


def unknown_word() -> str:
    """Return what is wrong with the environment's word, "" if nothing is."""
    said, words = os.environ.get(VARIABLE, ""), ("again", "off", "keep")
    return "" if said in ("", *words) else f"{VARIABLE}={said}: there is no such word; write {', '.join(words)}"


def busy() -> str:
    """Return what says that others compute on this machine, "" if they hardly do, or do not matter."""
    if os.environ.get(VARIABLE) == "keep":
        return ""
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    return f"a load of {load:.1f} on {cores} cores" if load > _BUSY * cores else ""


def taken(key: str) -> Calibration | None:
    if os.environ.get(VARIABLE) in ("again", "off"):
        return None
    try:
        found = json.loads(_file(key).read_text(encoding="utf-8"))
        if found["form"] != _FORM or found["key"] != key or found.pop("sum") != _sum(found):
            return None
        runs = tuple(MeasuredPlan(Plan.from_json(plan), float(seconds)) for plan, seconds in found["runs"])
        seen = tuple((tuple(map(float, place)), float(weight)) for place, weight in found["constants"].pop("seen"))
        constants = Constants(**found["constants"], seen=seen)
        return Calibration(parse(found["workload"]), Network(**found["network"]), constants, runs)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def keep(key: str, one: Calibration) -> None:
    """Keep a calibration for this user alone; a folder that cannot be written to keeps none."""
    if os.environ.get(VARIABLE) == "off":
        return
    network = {field.name: getattr(one.network, field.name) for field in dataclasses.fields(one.network)}
    network = {name: value for name, value in network.items() if name not in ("reached", "routed")}
    document = {
        "form": _FORM, "key": key, "workload": str(one.workload), "network": network,
        "constants": dataclasses.asdict(one.constants),
        "runs": [(run.plan.to_json(), run.step_s) for run in one.runs],
    }  # fmt: skip
    try:
        file = _file(key)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=file.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump({**document, "sum": _sum(document)}, out)
            os.replace(draft, file)  # others find all of it or nothing
        except OSError:
            os.unlink(draft)
    except OSError:
        return


def _sum(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _file(key: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not cache.is_absolute():  # a user without a home directory
        raise FileNotFoundError("no home directory")
    return cache / "hocket" / "calibrations" / f"{key[:32]}.json"


def _choices() -> str:
    """Return what the environment says of collective algorithms: text, or what is in the file that it names."""
    said = os.environ.get("HOCKET_CHOICES", "")
    try:
        return Path(said).read_text(encoding="utf-8") if said.endswith(".toml") else said
    except (OSError, UnicodeDecodeError):
        return said


def _plain(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return attributes that say how a module computes and that its `repr` need not show."""
    told = sorted(vars(module).items())
    return [(name, value) for name, value in told if isinstance(value, bool | int | float | str) and name != "training"]


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _source(kind: Any) -> str:
    try:
        # Not the module: a script's is "__main__" where it runs, and another where it is imported.
        return f"{kind.__qualname__}:{inspect.getsource(kind)}"
    except (OSError, TypeError):
        return f"{kind.__module__}.{kind.__qualname__}"


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, Mapping):
        return [(str(name), _shapes(one)) for name, one in value.items()]
    if isinstance(value, tuple | list):
        return [_shapes(one) for one in value]
    return type(value).__qualname__
