"""Notices what a program does to a model or its optimizer past the Trainer, which would be lost or wrong."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch

from hocket._program import warn
from hocket.comm import torch_adapter

from ..data import gathered, has_own_hooks
from ..mesh import World
from ..pipeline import SplitError, followed
from ..state.checkpoint import PART

_OURS = ("hocket.parallel.", "hocket.keras.")


def refuse_other_steps(optimizer: Any, owner: object) -> None:
    """Have `optimizer.step()` raise an error where no Trainer calls it, unless it is one with a learning rate of 0.

    So it is as long as the owner, the Trainer's own, is there.

    Gradients are averaged by `Trainer.step`; where state is sharded the optimizer's gradients come from there alone. A
    loop of the program's own with the same optimizer would train each rank by itself, or not at all.
    """
    if (steps := torch_adapter.steps_of(optimizer)) is None:
        return

    there = weakref.ref(owner)

    @torch_adapter.outside_compiler
    def check(*_: Any) -> None:
        if there() is None:
            return
        if called_by_trainer(sys._getframe(1)) or all(
            group.get("lr") == 0 for group in optimizer.param_groups
        ):  # as DCP has state made
            return
        raise RuntimeError(
            "optimizer.step() was called past the Trainer, which averages gradients and has the optimizer step in "
            "trainer.step(batch): call that, or take hocket.distribute(model, optimizer, loader) for a loop of your own"
        )

    check.elementwise = True  # type: ignore[attr-defined]  # for `check_step_hooks`
    steps.register_step_pre_hook(check)


def called_by_trainer(frame: Any) -> bool:
    """Return whether a Trainer, or Keras, and not the program, has an optimizer step; `frame` is who calls a hook."""
    while frame is not None and not str(frame.f_globals.get("__name__", "")).startswith(_OURS):
        frame = frame.f_back
    return frame is not None


def check_step_hooks(optimizer: Any) -> None:
    """Refuse the program's hooks on the optimizer's steps where the plan divides what they see.

    A hook that does not say that it works element by element is a RuntimeError.
    """
    hooks = [
        hook
        for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        for hook in getattr(optimizer, kind, {}).values()
        if not getattr(hook, "elementwise", False)
    ]
    if hooks:
        name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
        raise RuntimeError(
            f"the program has a hook on the optimizer's steps ({name}), and under this plan no rank has all parameters "
            "and gradients when it is called: for clipping say clip_norm in the plan, else take a plan of data "
            "parallelism alone. A hook that treats each element by itself, through the optimizer's groups, says so by "
            "an attribute: hook.elementwise = True"
        )


def mark_parts(optimizer: Any, world: World) -> None:
    """Have the state dicts of an optimizer that works on parts of parameters say whose they are, and refuse others'."""
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):  # of a library, that has not called torch's __init__
        return
    mine = [world.rank, world.size]

    def mark(_: Any, state: dict[str, Any]) -> None:
        state[PART] = mine

    def check(_: Any, state: dict[str, Any]) -> None:
        if state.get(PART) == mine:
            return
        what = "of whole parameters" if PART not in state else "of rank {} of {} alone".format(*state[PART])
        raise ValueError(
            f"this is the optimizer's state {what}, and the plan has rank {world.rank} of {world.size} update parts of "
            "its own: keep it by trainer.save, which trainer.load reads under every plan; whole state can also be "
            "loaded before the Trainer is made"
        )

    optimizer.register_state_dict_post_hook(mark)
    optimizer.register_load_state_dict_pre_hook(check)


def hint_at_loading(model: torch.nn.Module) -> None:
    """Have errors of `model.load_state_dict`, which takes what a rank holds alone, say what takes whole weights."""
    if not isinstance(model, torch.jit.ScriptModule):  # which takes no such hooks
        model.register_load_state_dict_pre_hook(_hint)  # type: ignore[no-untyped-call]


def hint_at_saving(model: torch.nn.Module, *, quiet: bool) -> None:
    """Say what gives whole weights where a model's are asked for that has this rank's parts alone.

    `model.state_dict()` warns, unless `quiet`; pickling and what writes files of safetensors is refused.
    """
    model.register_state_dict_pre_hook(_refuse_files if quiet else _warn)  # type: ignore[no-untyped-call]
    model.__reduce_ex__ = MethodType(_refuse_pickling, model)  # type: ignore[method-assign]


def refuse_tracing(model: torch.nn.Module) -> None:
    """Refuse traces of a model of which a rank computes its part: `torch.jit`'s, `torch.export` and a pipeline's."""
    model.register_forward_pre_hook(_refuse_traces, prepend=True)
    model.__prepare_scriptable__ = _refuse_script  # type: ignore[assignment]


def _refuse_traces(model: torch.nn.Module, *_: Any) -> None:
    if followed():
        raise SplitError(
            f"the forward of this model calls another model ({type(model).__name__}) that a Trainer has divided among "
            "ranks: all ranks call that together, and the stages of a pipeline are each called by their own. Compute "
            "its outputs first (predict of its Trainer) and give them with the batch, or take a plan without a pipeline"
        )
    if torch._C._get_tracing_state() is not None or torch.compiler.is_exporting():
        raise RuntimeError(_NO_EXPORT)


def _refuse_script() -> None:
    raise RuntimeError(_NO_EXPORT)


_NO_EXPORT = (
    "the plan divides the model among ranks, and a trace or an export would hold what this rank computes: load "
    "trainer.state_dict(), or a file of trainer.save_model, into a model of one process, and export that"
)


def _refuse_pickling(model: torch.nn.Module, protocol: int) -> Any:
    if sys._getframe(1).f_globals.get("__name__") == "copy":
        return type(model).__reduce_ex__(model, protocol)
    raise RuntimeError(
        "the plan divides parameters among ranks, and this model, which has what one rank holds, cannot be pickled: "
        "save trainer.state_dict(), which has the whole model's weights, or call trainer.save or trainer.save_model"
    )


_WRITERS = ("save_pretrained", "save_model", "save_torch_model")  # of transformers, diffusers and peft, of safetensors


def _refuse_files(*_: Any) -> None:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _WRITERS and not str(frame.f_globals.get("__name__", "")).startswith(_OURS):
            raise RuntimeError(
                f"the plan divides parameters among ranks, and {frame.f_code.co_name} would write what this one holds: "
                "call trainer.save_model(folder) on every rank, or give save_pretrained the argument "
                "state_dict=trainer.state_dict()"
            )
        frame = frame.f_back


def _warn(*_: Any) -> None:
    _refuse_files()
    warn(
        "the plan divides parameters among ranks, and this state dict has what one rank holds: trainer.state_dict(), "
        "called on every rank, has the whole model's",
    )


def _hint(
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


class OtherParameters:
    """Notices parameters that are to be trained only after the Trainer was made: it has no gradients of these.

    Where a rank updates its share of the parameters by groups of its own (`own_groups`), it also notices parameters
    that the program moves between the optimizer's groups, or takes out of them.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, *, own_groups: bool) -> None:
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._known = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self._optimizer = optimizer
        self._groups = self._grouped() if own_groups else None

    def _grouped(self) -> list[list[int]]:
        return [[id(p) for p in group["params"]] for group in self._optimizer.param_groups]

    def check(self) -> None:
        """Raise a RuntimeError if there are any."""
        thawed = next((name for name, p in self._frozen if p.requires_grad), None)
        if thawed is not None:
            raise RuntimeError(
                f"parameter {thawed!r} was frozen when the Trainer was made, which so has no gradients of it, and "
                "requires gradients now: have it require them when the Trainer is made, and freeze it after that until "
                "it is to be trained; or make a new Trainer"
            )
        if any(id(p) not in self._known for group in self._optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                "the optimizer was given other parameters after the Trainer was made (add_param_group), which knows "
                "nothing of them: add their group before that, and freeze its parameters after that until they are to "
                "be trained; or make a new Trainer"
            )
        if self._groups is not None and self._grouped() != self._groups:
            raise RuntimeError(
                "parameters were moved between the optimizer's groups, or taken out of them, after the Trainer was "
                "made, and by this plan a rank updates its share of them by groups of its own: change the groups "
                "before that, freeze what is not to be trained any more, or plan with data parallelism, shard = "
                '"parameters" or tensor parallelism'
            )


class ChangedModel:
    """Notices parameters that take the places of others after the Trainer was made, and modules where it is in stages.

    What the Trainer clips, updates, saves and loads are the parameters that it was given.
    """

    def __init__(self, model: torch.nn.Module, *, staged: bool) -> None:
        self._model, self._staged = model, staged
        self._held = self._inside()

    def check(self) -> None:
        """Raise a RuntimeError if there are any."""
        for name, one in (now := self._inside()).items():
            if self._held.get(name) is not one and id(one) not in gathered(self._model):
                self._refuse(name, "is another than when the Trainer was made" if name in self._held else "is new")
        for name in self._held.keys() - now.keys():
            self._refuse(name, "is no longer in the model")

    def _inside(self) -> dict[str, torch.nn.Module | torch.nn.Parameter]:
        modules = self._model.named_modules(remove_duplicate=False) if self._staged else ()
        return {**dict(modules), **dict(self._model.named_parameters(remove_duplicate=False))}

    def _refuse(self, name: str, what: str) -> None:
        raise RuntimeError(
            f"{name!r} {what} (a module or parameter was replaced), so that what the Trainer trains, saves and loads "
            "is not what the model computes with: change the model before the Trainer is made, or make a new one"
        )


class WrittenParts:
    """Notices that the program writes to parameters that not every rank holds whole, and says once what that means."""

    def __init__(self, parts: Mapping[str, torch.nn.Parameter]) -> None:
        self._parts = list(parts.items())
        self.note()

    def note(self) -> None:
        """Take what the parts are now for what training has made of them."""
        self._seen = [_state(p) for _, p in self._parts]

    def check(self) -> None:
        """Warn of a part that has been written to since."""
        for (name, p), seen in zip(self._parts, self._seen, strict=True):
            if _state(p) != seen:
                warn(
                    f"the program has written to parameter {name!r}, which not every rank holds whole. What is done "
                    "element by element (clamp_, mul_) is what one process does; rows by their numbers, "
                    "initialisation, and norms under tensor parallelism, are not: give the whole to "
                    "trainer.load_state_dict, or do it before the Trainer is made",
                )
                self._parts = []
                return


class LateHooks:
    """Notices hooks on gradients that came after the Trainer was made, which refuses those that were there before.

    Args:
        parts: The parameters that not every rank holds whole, by name.
        staged: Whether they are in stages of a pipeline.
    """

    def __init__(self, parts: Mapping[str, torch.nn.Parameter], *, staged: bool) -> None:
        self._parts, self._staged = dict(parts), staged

    def check(self) -> None:
        """Warn of the first."""
        name = next((name for name, p in self._parts.items() if has_own_hooks(p)), None)
        if name is None:
            return
        self._parts = {}
        seen = "a micro-batch's gradient, or the sum of those before" if self._staged else "that of this rank's part"
        right = "What is linear" if self._staged else "What it does element by element (clamp)"
        warn(
            f"the program has a hook on the gradient of parameter {name!r}, which by this plan sees {seen}. {right} is "
            "what one process does; norms, and what is done by them, are not: do it in the optimizer, or take a plan "
            "of data parallelism alone. With clip_norm in the plan, trainer.grad_norm is the norm of all",
        )


def _state(parameter: torch.nn.Parameter) -> tuple[int, int]:
    return parameter._version, 0 if hasattr(parameter, "to_local") else parameter.data_ptr()
