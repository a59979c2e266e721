"""What a Trainer trains alone: other optimizers and Trainers of the same parameters are noticed and refused."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hocket.comm.torch_adapter import outside_compiler
from hocket.planner import AXES, Plan

from ..state import check_elementwise, parameters_of
from ._outside import called_by_trainer


class Claim:
    """The parameters that a Trainer was given, and whether others may train them too.

    Where every rank has all of a model and of its gradients, others may: two Trainers in turn, a second optimizer.
    Where ranks update parts, what another does would be lost, or done to a part.
    """

    def __init__(self, trainer: Any, model: torch.nn.Module, optimizer: Any) -> None:
        """Note what is there before a plan divides it. Raises ValueError: another Trainer has, it or the optimizer."""
        self._trainer = weakref.ref(trainer)
        self._model = weakref.ref(model)
        self._names = {id(p): name for name, p in model.named_parameters()}
        # Only of those that sharding puts out of the model: torch moves no parameter that has weak references, as those
        # that are deferred are.
        moving = any(p.is_meta for p in parameters_of(model))
        self._former = [] if moving else [(name, weakref.ref(p)) for name, p in model.named_parameters()]
        self._optimizer = weakref.ref(optimizer)
        self._plan: Plan | None = None
        self._priority = False
        self._divided = self._overtaken = False
        check_undivided(model)
        given = (p for group in optimizer.param_groups for p in group["params"])
        if any(one._optimizer() is optimizer for one in _claims) and any(id(p) not in self._names for p in given):
            raise ValueError(
                f"another Trainer works with this optimizer ({type(optimizer).__name__}), and its plan has put parts "
                "of parameters into its groups: make a new optimizer of model.parameters() for this one"
            )

    def settle(self, model: torch.nn.Module, plan: Plan, *, local: bool, divided: bool) -> None:
        """Take note of what the plan has made of the model: is all of it on every rank, or does each have a part?"""
        given = [p for _, there in self._former if (p := there()) is not None]
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._former = [(name, there) for name, there in self._former if id(there()) not in self._names]
        self._divided = divided
        for one in _claims:
            one._overtaken |= (one._plan is not None or not local) and one._shared(given) != ""
        self._plan = None if local else plan
        self._priority = plan.priority
        _watch_optimizers()
        _claims.append(self)

    def check(self) -> None:
        """Raise a RuntimeError if a later Trainer trains the same parameters, and not both may."""
        if self._overtaken:
            raise RuntimeError(
                "another Trainer has been made of the same parameters since, and under these plans one does not see "
                "what the other does: train, save and load by the later one, or by plans of data parallelism alone"
            )

    def refuse(self, optimizer: Any, caller: Any) -> None:
        """Refuse a step of an optimizer that updates what is claimed, if this would be lost or wrong."""
        parted = self._plan is not None and not self._overtaken
        if not (parted or self._priority) or optimizer is self._optimizer():
            return
        if self._trainer() is None and not self._divided:
            return
        name = self._shared(p for group in optimizer.param_groups for p in group["params"])
        if name and called_by_trainer(caller):  # an optimizer inside of the Trainer's, say
            return
        if name and self._priority:
            raise RuntimeError(
                f"a second optimizer ({type(optimizer).__name__}) updates parameter {name!r} of a model that a Trainer "
                "trains with priority, where .grad has this rank's gradients alone: give the Trainer one optimizer, "
                "with groups for what is to be treated otherwise, or say priority = False"
            )
        if self._plan is None:
            return
        if name and self._plan.shard != "none":
            raise RuntimeError(
                f"a second optimizer ({type(optimizer).__name__}) updates parameter {name!r} of a model whose "
                f"gradients are divided among ranks by the Trainer's plan (shard = {self._plan.shard!r}): give the "
                "Trainer one optimizer, with groups for what is to be treated otherwise, or say shard = 'none'"
            )
        if name and any(axis.elementwise and axis.degree(self._plan) > 1 for axis in AXES):
            check_elementwise(optimizer)

    def _shared(self, parameters: Iterable[torch.nn.Parameter]) -> str:
        """Return the name of a parameter that is claimed; "" if none is."""
        given, model = list(parameters), self._model()
        found = next((self._names[id(p)] for p in given if id(p) in self._names), "")
        if found:  # or an id is that of one that is gone
            mine = {} if model is None else {id(p): name for name, p in model.named_parameters()}
            found = next((mine[id(p)] for p in given if id(p) in mine), "")
        former = (name for name, there in self._former if any(there() is p for p in given))
        return found or next(former, "")


_claims: list[Claim] = []


def check_undivided(model: torch.nn.Module) -> None:
    """Raise a ValueError if a Trainer has divided this model among ranks, which stays so without it."""
    _claims[:] = [one for one in _claims if one._model() is not None]
    if any(one._divided and one._shared(parameters_of(model)) for one in _claims):
        raise ValueError(
            "a Trainer has divided this model among ranks before, and each has its part alone: build the model "
            "anew, and have it load the state_dict() or a checkpoint of that Trainer"
        )


@functools.cache  # once a process
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)


@outside_compiler
def _before_step(optimizer: Any, *_: Any) -> None:
    for claim in _claims:
        claim.refuse(optimizer, sys._getframe(1))
