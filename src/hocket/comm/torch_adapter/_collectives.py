"""What a program says to other ranks by torch.distributed, heard or refused."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import distributed_c10d as _c10d

_any: Any = _c10d


_hearers: list[Callable[[], None]] = []
_plain: list[tuple[Any, str, Any]] = []  # what stands in the seams while nobody hears


@contextlib.contextmanager
def hearing_collectives(hear: Callable[[], None]) -> Iterator[None]:
    """Open a block in which `hear` is called before this rank talks to others; blocks may end in any order."""

    def heard(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            for one in tuple(_hearers):
                one()
            return function(*args, **kwargs)

        return call

    if not _hearers:
        functional: Any = sys.modules.get("torch.distributed._functional_collectives")
        seams = [(_any, "_rank_not_in_group")]
        seams += [(functional, "_resolve_group")] * hasattr(functional, "_resolve_group")
        _plain[:] = [(owner, name, getattr(owner, name)) for owner, name in seams]
        for owner, name, function in _plain:
            setattr(owner, name, heard(function))
    _hearers.append(hear)
    try:
        yield
    finally:
        _hearers.remove(hear)
        if not _hearers:
            for owner, name, function in _plain:
                setattr(owner, name, function)


_AROUND = ("wrapper", "handle_torch_function", "__torch_function__", "all_reduce")
"""What calls `all_reduce` for the program: what logs its exceptions, and modes that see functions."""


def reduced() -> torch.Tensor | None:
    """Return, where `hearing_collectives` calls, what the program sums over ranks or averages; None for all else."""
    call = sys._getframe(3)  # of torch.distributed.all_reduce, below those of `hear`, of `call` and of this
    by = call.f_back
    while by is not None and by.f_code.co_name in _AROUND:
        by = by.f_back
    sums = call.f_code.co_name == "all_reduce" and str(call.f_locals.get("op")) in ("RedOpType.SUM", "RedOpType.AVG")
    own = by is not None and not str(by.f_globals.get("__name__")).startswith("hocket.")
    return call.f_locals.get("tensor") if sums and own else None


_DEEP = 16  # calls between a collective operation and who wants it, and more


def called_by(*modules: str) -> bool:
    """Return, where `hearing_collectives` calls, whether one of these modules, or one within, has called."""
    call: Any = sys._getframe(2)
    for _ in range(_DEEP):
        if call is None:
            break
        name = str(call.f_globals.get("__name__"))
        if any(name == one or name.startswith(f"{one}.") for one in modules):
            return True
        call = call.f_back
    return False


_GATHERS = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object", "all_gather_tensor",
    "all_to_all", "all_to_all_single",
}  # fmt: skip


def gathered_by_program() -> str:
    """Return, where `hearing_collectives` calls, by what the program gathers; "" where it does not, or another does."""
    call: Any = sys._getframe(3)  # of torch.distributed, below those of `hear`, of `call` and of this
    name = ""
    while call is not None:
        module, of = str(call.f_globals.get("__name__")), call.f_code.co_name
        if module.startswith(("torch.distributed.fsdp", "torch.nn.parallel")):
            return ""
        if not module.startswith("torch.") and of not in _AROUND:
            return "" if module.startswith("hocket.") else name
        name = of if of in _GATHERS else name
        call = call.f_back
    return ""


def without_collectives() -> contextlib.AbstractContextManager[None]:
    """Open a block in which this rank runs something alone: what would talk to other ranks raises RuntimeError."""

    def refuse() -> None:
        raise RuntimeError("a collective operation in what a rank runs alone")

    return hearing_collectives(refuse)
