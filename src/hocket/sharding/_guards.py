"""Stands where torch does not ask tensors how a function is to be called, so that no shard gets through unseen.

torch is changed for the whole process, once; what meets no divided tensor is done as always.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import torch_adapter
from ._engine import call_on_shards
from ._sharded_tensor import GatheredView, ShardedTensor, as_local, gathered, noted, refusal
from ._trees import leaves, mapped


def guard_torch() -> None:
    """Have torch ask about shards where it does not by itself.

    That is in autograd and scripted functions, `torch.func`, old and nested constructors, DLPack, weighted losses, and
    where checkpointed code is compared with what it computed first.
    """
    if not _guarded:
        _guarded.append(True)
        _guard_autograd_functions()
        _guard_scripted_functions()
        _guard_transforms()
        _guard_constructor()
        _guard_handing_over()
        _guard_checkpoints()
        _mend_l1_loss()


_guarded: list[bool] = []
_WATCHED = (ShardedTensor, GatheredView)
_WEIGHT = 2  # place of the weights among what `l1_loss` has torch look through for tensors that answer


def _guard_autograd_functions() -> None:
    """Give autograd functions of a user gathered tensors, since their backward may mix what is divided.

    Those of `torch.distributed` hand on what they are given.
    """
    plain: Any = torch.autograd.Function.__dict__["apply"]  # a class method; from torch 2.15 on one of C's

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        watched = torch._C._is_torch_function_enabled() and any(type(one) in _WATCHED for one in args)
        if watched and not cls.__module__.startswith("torch.distributed"):
            args = tuple(gathered(one) for one in args)
        return plain.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]


def _guard_scripted_functions() -> None:
    """Have functions that were scripted or traced called by the rules of what they do, as scripted modules are."""
    plain: Any = torch.jit.ScriptFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        watched = torch._C._is_torch_function_enabled()
        if watched and any(type(leaf) in _WATCHED for leaf in leaves((args, kwargs))):
            with as_local():
                return call_on_shards(self, args, kwargs)
        return plain(self, *args, **kwargs)

    torch.jit.ScriptFunction.__call__ = call  # type: ignore[method-assign]


def _guard_transforms() -> None:
    """Give `torch.func` gathered tensors; what a function under it makes of divided ones from outside is refused."""

    def entering(plain: Any) -> Any:
        def enter(*args: Any, **kwargs: Any) -> Any:
            if any(type(one) is ShardedTensor for one in args):
                with torch_adapter.outside_transforms():  # the full tensor is made outside of the transform
                    args = tuple(gathered(one) for one in args)
            return plain(*args, **kwargs)

        return enter

    def leaving(plain: Any) -> Any:
        def leave(tensor: Any, *args: Any) -> Any:
            if noted(tensor) is not None:
                raise refusal("torch.func", tensor, "makes of a divided tensor that is none of the arguments")
            return plain(tensor, *args)

        return leave

    for guard, seams in ((entering, torch_adapter.ENTERING), (leaving, torch_adapter.LEAVING)):
        for module, name in seams:
            setattr(module, name, guard(getattr(module, name)))


def _guard_checkpoints() -> None:
    """Have torch.utils.checkpoint compare parts with parts.

    It asks about what is saved where tensors are parts the first time, and where they stand for full ones the second.
    """
    checks = torch_adapter.CHECKPOINT_CHECKS
    for name, plain in checks.items():

        def check(tensor: Any, plain: Any = plain) -> Any:
            with as_local():
                return plain(tensor)

        checks[name] = check


def _guard_constructor() -> None:
    """Give `torch.Tensor(x)`, the constructor of old programs, the full tensor."""
    plain = torch.Tensor.__new__

    def new(*args: Any, **kwargs: Any) -> Any:  # named so: torch.compile, loaded later, compares it with its own
        if any(type(one) in _WATCHED for one in (*args, *kwargs.values())):
            args, kwargs = mapped(gathered, (args, kwargs))
        return plain(*args, **kwargs)

    torch.Tensor.__new__ = staticmethod(new)  # type: ignore[method-assign]


def _guard_handing_over() -> None:
    """Give full tensors to nested ones, and to who asks for DLPack's old capsules."""

    def guarded(plain: Any) -> Any:
        @functools.wraps(plain)
        def hand_over(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(mapped(gathered, tensors), *args, **kwargs)

        return hand_over

    seams: Any = [(torch.nested, "nested_tensor"), (torch.nested, "as_nested_tensor")]
    for module, name in [*seams, (torch.utils.dlpack, "to_dlpack")]:
        setattr(module, name, guarded(getattr(module, name)))


def _mend_l1_loss() -> None:
    """Have whoever answers for tensors in `l1_loss` hear of its weights, which torch drops on the way there.

    The function that passes the question on is replaced, not the loss: programs hold the loss by other names.
    """
    functional: Any = torch.nn.functional
    plain = functional.handle_torch_function

    def handle(function: Any, relevant: Any, *args: Any, **kwargs: Any) -> Any:
        dropped = function is functional.l1_loss and "weight" not in kwargs
        if dropped and len(relevant) > _WEIGHT and relevant[_WEIGHT] is not None:
            kwargs["weight"] = relevant[_WEIGHT]
        return plain(function, relevant, *args, **kwargs)

    functional.handle_torch_function = handle
