"""Runs a tensor program on shards while its code speaks of full tensors.

Where a forward says `q.view(B, T, self.n_head, C // self.n_head)`, this rank has some of the heads only. While the
interpreter is entered, torch functions are looked at: shapes are told as those of the full tensor, and every call is
made on this rank's shards by the rule of its operator. Tensors stay plain ones; how each is divided is noted on it in
an attribute.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ._call import NO_ANSWER, Local, Operand, OperatorCall, ShardPeers, placements_of
from ._decompose import apply_rule
from ._operators import changes_first, operator_name
from ._placement import CannotShard, Shard, full_shape
from ._table import RULES
from ._trees import leaves, mapped

_NOTE = "_hocket_shard"
_local = threading.local()

Listener = Callable[[str, Any, str, str], None]
"""Hears of a call on shards: operator, arguments, "divided" or "gathered", and why."""


def note(tensor: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    """Write on a tensor how it is divided; None for a replicated one. Return the tensor."""
    if shard is not None:
        setattr(tensor, _NOTE, shard)
    elif hasattr(tensor, _NOTE):
        delattr(tensor, _NOTE)
    return tensor


def noted(tensor: Any) -> Shard | None:
    """Return how a tensor is divided; None where it is replicated, or no tensor."""
    found: Shard | None = tensor.__dict__.get(_NOTE) if isinstance(tensor, torch.Tensor) else None
    return found


def gathered(peers: ShardPeers, tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor, on every rank; a collective operation where ranks exchange rows."""
    shard = noted(tensor)
    return tensor if shard is None else peers.fetch(tensor, shard, [(0, shard.size)] * peers.size, 0.0)


@contextmanager
def as_local() -> Iterator[None]:
    """Make a block in which this thread's torch functions are called as they are: the code means shards."""
    _local.paused = getattr(_local, "paused", 0) + 1
    try:
        yield
    finally:
        _local.paused -= 1


def interpreting() -> bool:
    """Return whether this thread interprets already."""
    return bool(getattr(_local, "running", False))


@contextmanager
def interpreted(peers: ShardPeers, listener: Listener | None = None) -> Iterator[None]:
    """Make a block in which torch functions are looked at; a block inside another changes nothing."""
    if interpreting():
        yield
        return
    _local.running = True
    try:
        with ShardingMode(peers, listener):
            yield
    finally:
        _local.running = False


class ShardingMode(TorchFunctionMode):
    """Makes calls with shards as if they were with full tensors, while it is entered.

    Args:
        peers: the ranks that share what is divided.
        listener: hears of what was divided and gathered; None for nobody.
    """

    def __init__(self, peers: ShardPeers, listener: Listener | None = None) -> None:
        super().__init__()
        self._peers = peers
        self._listener = listener

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(_local, "paused", 0):
            return func(*args, **kwargs)
        divided = any(isinstance(x, torch.Tensor) and _NOTE in x.__dict__ for x in leaves((args, kwargs)))
        if not divided and not self._peers.batches:
            return func(*args, **kwargs)
        name = operator_name(func)
        if not divided and name != "batch_norm":
            return func(*args, **kwargs)
        if name in self._peers.passed:
            return note(func(*args, **kwargs), args[0].__dict__.get(_NOTE))
        if name.startswith("get_") and name not in RULES:
            return func(*args, **kwargs)
        call = OperatorCall(
            name,
            mapped(_operand, tuple(args)),
            mapped(_operand, kwargs),
            self._peers.size,
            self._peers.rank,
            self._peers.exchanges,
            func,
            changes_first(func, kwargs),
        )
        try:
            outcome = apply_rule(call)
        except CannotShard as error:
            return self._gathered(call, args, kwargs, error)
        self._say(name, args, kwargs, call.gathered)
        if call.answer is not NO_ANSWER:
            return call.answer
        device = next((o.tensor.device for o in call.operands()), torch.device("cpu"))
        with self._peers.own_random_numbers(device) if call.random else nullcontext():
            result = Local(self._peers, func).result(call, outcome)
        made = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor, shard in zip(made, placements_of(outcome, len(made)), strict=True):
            note(tensor, shard)
        return result

    def _gathered(self, call: OperatorCall, args: Any, kwargs: Any, error: CannotShard) -> Any:
        if not self._peers.exchanges:
            raise error
        if call.in_place:
            raise NotImplementedError(
                f"{call.func.__name__} cannot be made on a tensor that is divided among ranks ({error.reason}): write "
                "it so that it makes a new tensor"
            ) from error
        self._say(call.name, args, kwargs, error.reason)
        full = mapped(lambda leaf: gathered(self._peers, leaf) if noted(leaf) is not None else leaf, (args, kwargs))
        return call.func(*full[0], **full[1])

    def _say(self, name: str, args: Any, kwargs: Any, why: str) -> None:
        if self._listener is not None:
            self._listener(name, (args, kwargs), "gathered" if why else "divided", why)


def _operand(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shard: Shard | None = leaf.__dict__.get(_NOTE)
    return Operand(full_shape(leaf.shape, shard), shard, leaf.requires_grad, False, leaf.dtype, leaf)
