"""Runs a script for `hocket check` in one rank and writes down the loss of every backward pass, or Trainer's step.

`hocket check` starts this file on each rank:

    check_runner.py DIRECTORY STEPS SEED SCRIPT [ARGUMENT...]

The script needs no change: `torch.autograd.backward`, through which all of torch's ways to back-propagate go, is
wrapped, and so is `Trainer.step`, which may call it several times. A wrapped function costs nothing elsewhere, while a
mode that sees every operation would slow the script down and keep torch.compile from working.
"""

import json
import os
import random
import runpy
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from hocket.parallel.batches import batch as _batch
from hocket.parallel.compose import Trainer
from hocket.parallel.data import DataParallel, living
from hocket.parallel.data.relaxed import register as _register


class Enough(SystemExit):
    """Ends the script after as many backward passes as were asked for."""


class Notebook:
    """What one rank writes down.

    Its losses go into `directory`. The script is ended after `steps` backward passes, 0 for not at all; torch was given
    `seed` before it began.
    """

    def __init__(self, directory: Path, rank: int, steps: int, seed: int) -> None:
        self._losses: TextIO = (directory / f"losses-{rank}.jsonl").open("w")
        self._facts_path = directory / f"facts-{rank}.json"
        self._steps = steps
        self._seed = seed
        self._count = 0
        self._random_state: bytes | None = None
        self._draws = False
        self._models: dict[int, DataParallel] = {}
        self._shared_batches = False
        self._loaded = {*sys.modules}  # before the script begins
        self.in_trainer = False  # whether a Trainer is at work: its backward passes are parts of a step, or trials
        self.trained: list[tuple[Trainer, torch.nn.Module]] = []  # each Trainer with the program's model
        self.seeded = False

    def of_trainer(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call that is a Trainer's."""
        self.in_trainer = True
        try:
            return call(*args, **kwargs)
        finally:
            self.in_trainer = False

    def backward_done(self, loss: float) -> None:
        """Write down the loss of a backward pass."""
        note = _batch.current()
        share = None
        if note is not None and note.share is not None and note.share.total:
            self._shared_batches = True
            share = note.weight / note.share.world  # by samples, or by what the loss divides by
        state = torch.get_rng_state().numpy().tobytes()
        self._draws |= self._random_state not in (None, state)
        self._random_state = state
        self._models.update({m._number: m for m in living()})  # keeps them for the facts
        self.write(loss=loss, share=share)

    def write(self, **entry: Any) -> None:
        """Write down a loss. Raises Enough: it was the last that was asked for."""
        self._losses.write(json.dumps(entry) + "\n")
        self._losses.flush()
        self._count += 1
        if self._steps and self._count == self._steps:
            raise Enough(0)

    def close(self) -> None:
        """Write what explains a difference."""
        models = [self._models[number] for number in sorted(self._models)]
        every = [*models, *(model for _, model in self.trained)]
        modules = [(name, module) for model in every for name, module in model.named_modules()]
        parameters = [(name, p) for model in models for name, p in model.named_parameters()]
        sent = {c["method"] for m in models if (c := m.compression_report())}
        facts = {
            "reduction": "sum" if models and all(m._loss_reduction == "sum" for m in models) else "mean",
            "distributed": bool(every),
            "shared_batches": self._shared_batches or bool(self.trained),
            "keras": not every and "hocket.keras" in sys.modules.keys() - self._loaded,
            "draws": self._draws,
            "seeded": self.seeded or torch.initial_seed() != self._seed,
            "dropout": [name for name, module in modules if _drops(module)],
            "batch_norm": [name for name, module in modules if _normalises_batch(module)],
            "compression": sorted(sent | {one.plan.compression for one, _ in self.trained} - {"none"}),
            "types": sorted({str(p.dtype).removeprefix("torch.") for model in every for p in model.parameters()}),
            "relaxed": _register.reasons(),
            "parameters": [[name, _checksum(p)] for name, p in parameters],
        }
        self._facts_path.write_text(json.dumps(facts))
        self._losses.close()


def watch(notebook: Notebook) -> None:
    """Have every backward pass of this process written down, and whether it seeds."""
    backward = torch.autograd.backward

    def recording(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if notebook.in_trainer:
            backward(tensors, grad_tensors, *args, **kwargs)
            return
        loss = _value(tensors, grad_tensors)
        backward(tensors, grad_tensors, *args, **kwargs)
        notebook.backward_done(loss)

    torch.autograd.backward = recording
    build, step = Trainer.__init__, Trainer.step

    def building(trainer: Trainer, model: Any, *args: Any, **kwargs: Any) -> None:
        notebook.of_trainer(build, trainer, model, *args, **kwargs)
        notebook.trained.append((trainer, model if isinstance(model, torch.nn.Module) else trainer.model))

    def stepping(trainer: Trainer, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = notebook.of_trainer(step, trainer, batch)
        notebook.write(loss=loss.item(), whole=True)
        return loss

    Trainer.__init__, Trainer.step = building, stepping  # type: ignore[assignment, method-assign]
    manual_seed = torch.manual_seed

    def seeding(seed: Any) -> torch.Generator:
        notebook.seeded = True  # whatever the seed: it may be the one that was given before
        return manual_seed(seed)

    torch.manual_seed = torch.random.manual_seed = seeding


def _value(tensors: Any, gradients: Any) -> float:
    """Return what is differentiated: the loss, or the product of outputs and the gradients given for them."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    gradients = [gradients] if isinstance(gradients, torch.Tensor) or gradients is None else list(gradients)
    total = 0.0
    for i, tensor in enumerate(tensors):
        gradient = gradients[i] if i < len(gradients) else None
        value = tensor.detach() if gradient is None else tensor.detach() * gradient
        total += value.double().sum().item()
    return total


def _drops(module: torch.nn.Module) -> bool:
    rate = getattr(module, "p", None) if "Dropout" in type(module).__name__ else getattr(module, "dropout", None)
    return isinstance(rate, float) and rate > 0 and module.training


def _normalises_batch(module: torch.nn.Module) -> bool:
    return "BatchNorm" in type(module).__name__ and "Sync" not in type(module).__name__ and module.training


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


def main() -> None:
    """Run the script as `python SCRIPT ARGUMENT...` would."""
    directory, steps, seed, script, *arguments = sys.argv[1:]
    rank = int(os.environ.get("RANK", "0"))
    # A script that does not seed is the same with any number of ranks on rank 0, and different on others: what must not
    # depend on other ranks' random numbers shows.
    own_seed = int(seed) + rank
    torch.manual_seed(own_seed)
    random.seed(own_seed)
    np.random.seed(own_seed)
    notebook = Notebook(Path(directory), rank, int(steps), own_seed)
    watch(notebook)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        notebook.close()


if __name__ == "__main__":
    main()
