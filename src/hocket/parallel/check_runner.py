"""Runs a training script as it is and notes the loss of every backward pass: `python -m ... RESULT STEPS SCRIPT ...`.

`hocket check` starts it once on one rank and once on several, and compares. Each rank writes what it saw for itself, so
that no operation is added to the script's own, and a script that dies in the middle has still said something.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import _batch, _data_parallel


class Enough(SystemExit):
    """As many backward passes as were asked for."""


class LossRecorder(TorchFunctionMode):
    """Notes the value and the weight of everything whose `backward()` is called.

    Args:
        steps: after how many to end the script; 0 for never.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.losses: list[tuple[float, float]] = []
        self.setting: dict[str, Any] = {"sums": False, "distributed": False, "modules": []}
        self._steps = steps

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """See TorchFunctionMode."""
        if func is not torch.Tensor.backward:
            return func(*args, **(kwargs or {}))
        if self._steps and len(self.losses) == self._steps:
            raise Enough(0)
        if not self.losses:
            self._look_around()
        note = _batch.current()
        weight = 1.0 if note is None else note.weight
        self.losses.append((float(args[0].detach().double().sum()), weight))
        return func(*args, **(kwargs or {}))

    def _look_around(self) -> None:
        """Notes what the script trains; when it has ended, its models are gone."""
        models = list(_data_parallel._living)
        self.setting = {
            "sums": any(model._loss_reduction == "sum" for model in models),
            "distributed": bool(models),
            "modules": sorted({_kind(m) for model in models for m in model.module.modules()} - {""}),
        }


def _kind(module: torch.nn.Module) -> str:
    """The module's class where its mode of training makes a difference, else nothing."""
    if not module.training or getattr(module, "p", None) == 0.0:
        return ""
    return type(module).__name__


def main(result_path: str, steps: int, script: str, arguments: list[str]) -> None:
    """Runs `script` with `arguments` as `python script ...` would, and writes the losses to `result_path`.RANK."""
    recorder = LossRecorder(steps)
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        with recorder:
            runpy.run_path(script, run_name="__main__")
    except Enough:
        pass
    finally:
        document = {"losses": recorder.losses, **recorder.setting}
        Path(f"{result_path}.{os.environ.get('RANK', '0')}").write_text(json.dumps(document))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
