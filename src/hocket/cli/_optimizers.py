"""The optimizer that a user names for a plan: a class, and its settings."""

from __future__ import annotations

import ast
import importlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hocket.workload import OptimizerMaker

OptimizerName = Annotated[
    str | None,
    typer.Option(
        help="That trains a captured model: Adam if not given, or SGD:momentum=0.9, Adafactor, torchao.optim.AdamW8bit."
    ),
]


def optimizer_named(text: str) -> OptimizerMaker:
    """Return what makes the optimizer: of torch.optim, or by the full name of its class, its settings behind a colon.

    Raises:
        ValueError: there is no such optimizer, or it has no such setting.
    """
    from torch.optim import Optimizer

    from hocket.workload import optimizer_maker

    name, _, settings = text.partition(":")
    home, _, short = name.rpartition(".")
    try:
        kind = getattr(importlib.import_module(home or "torch.optim"), short, None)
    except (ImportError, ValueError) as error:
        raise ValueError(f"--optimizer {text!r}: {error}") from None
    if not (isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer):
        raise ValueError(
            f"--optimizer: {home or 'torch.optim'} has no optimizer {short!r}; write AdamW, SGD:momentum=0.9, or the "
            "full name of a class"
        )
    return optimizer_maker(kind, **_settings(text, settings))


def undivided(text: str) -> dict[str, Any]:
    """Return what a plan must be for the optimizer's sake: one that needs whole parameters divides none."""
    import torch

    from hocket.parallel.state import check_elementwise

    try:
        check_elementwise(optimizer_named(text)([torch.nn.Parameter(torch.zeros(2, 2))]))
    except ValueError:
        return {"shard": "none", "tensor_parallel_degree": 1}
    return {}


def _settings(text: str, settings: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in settings.split(",") if settings else ():
        name, equals, value = word.partition("=")
        if not equals or name in found:
            raise ValueError(f"--optimizer {text!r}: write each setting once, as SGD:momentum=0.9,nesterov=True")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise ValueError(f"--optimizer {text!r}: {value!r} is no number, True or False") from None
    return found
