"""Notices what a program does to a model or its optimizer past the Trainer, which would be lost or wrong."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

_OURS = ("hocket.parallel.", "hocket.keras.")


def refuse_other_steps(optimizer: Any, trainer: object) -> None:
    """Have `optimizer.step()` raise an error where no Trainer calls it, unless it is one with a learning rate of 0.

    So it is as long as the Trainer is there.

    Gradients are averaged by `Trainer.step`; where state is sharded the optimizer's gradients come from there alone. A
    loop of the program's own with the same optimizer would train each rank by itself, or not at all.
    """
    if not hasattr(optimizer, "register_step_pre_hook"):
        return

    there = weakref.ref(trainer)

    def check(*_: Any) -> None:
        if there() is None:
            return
        frame: Any = sys._getframe(1)
        while frame is not None:
            if str(frame.f_globals.get("__name__", "")).startswith(_OURS):
                return
            frame = frame.f_back
        if all(group.get("lr") == 0 for group in optimizer.param_groups):  # as DCP has state made
            return
        raise RuntimeError(
            "optimizer.step() was called past the Trainer, which averages gradients and has the optimizer step in "
            "trainer.step(batch): call that, or take hocket.distribute(model, optimizer, loader) for a loop of your own"
        )

    optimizer.register_step_pre_hook(check)


def hint_at_loading(model: torch.nn.Module) -> None:
    """Have errors of `model.load_state_dict`, which takes what a rank holds alone, say what takes whole weights."""

    def look(
        module: Any, state: Any, prefix: str, metadata: Any, strict: Any, missing: Any, extra: Any, errors: Any
    ) -> None:
        for name, parameter in module.named_parameters():
            given = state.get(f"{prefix}{name}")
            divided = isinstance(given, torch.Tensor) and hasattr(parameter, "to_local") != hasattr(given, "to_local")
            if divided or (given is not None and getattr(given, "shape", None) != parameter.shape):
                errors.append(
                    "the plan divides parameters among ranks, and each rank's model has its part alone: "
                    "trainer.load_state_dict(state, or a file) takes whole weights"
                )
                return

    model.register_load_state_dict_pre_hook(look)  # type: ignore[no-untyped-call]


class ReplacedModules:
    """Notices modules that a program puts into a model after the model has been cut into stages.

    Args:
        model: The user's.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._inside = weakref.WeakSet(model.modules())
        self._found = ""
        if not _watching:  # once a process: a hook that is taken off while torch goes through them is an error
            torch.nn.modules.module.register_module_module_registration_hook(_put_in)
        _watching.append(weakref.ref(self))

    def note(self, parent: torch.nn.Module, name: str, child: Any) -> None:
        """Take notice that a module is about to have another inside."""
        if parent in self._inside and child is not parent._modules.get(name):
            self._found = self._found or f"{type(parent).__name__}.{name}"

    def check(self) -> None:
        """Raise an error if there were any.

        Raises:
            RuntimeError: there were.
        """
        if self._found:
            raise RuntimeError(
                f"module {self._found} was replaced after the Trainer had cut the model into the stages of a pipeline, "
                "which do not have it: replace it before, or make a new Trainer"
            )


_watching: list[weakref.ref[ReplacedModules]] = []


def _put_in(parent: torch.nn.Module, name: str, child: Any) -> None:
    for reference in _watching:
        if (one := reference()) is not None:
            one.note(parent, name, child)
