"""Finds what reads tensors of collective operations that are under way: they hold no numbers until waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hocket.comm import torch_adapter


class _Work:
    """A handle of an operation on copies, which gives the tensors its results when it has been waited for."""

    def __init__(self, work: Any, tensor: torch.Tensor, result: torch.Tensor) -> None:
        self._work, self._tensor, self._result = work, tensor, result
        self._given, self._lock = False, threading.Lock()

    def wait(self, *args: Any) -> Any:
        done = self._work.wait(*args)
        self._give()
        return done

    def get_future(self) -> Any:
        future = mock.Mock()
        future.add_done_callback = lambda call: self._work.get_future().add_done_callback(partial(self._pass_on, call))
        return future

    def _pass_on(self, call: Callable[[Any], None], future: Any) -> None:
        self._give()
        call(future)

    @torch.no_grad()
    def _give(self) -> None:
        with self._lock:  # several threads may wait
            if not self._given:
                self._tensor.copy_(self._result)
                self._given = True


@torch.no_grad()
def _post(operation: Any, *tensors: torch.Tensor, **options: Any) -> Any:
    if not options.get("async_op"):
        return operation(*tensors, **options)
    tensor = tensors[0].detach()
    copies = [one.detach().clone() for one in tensors]
    tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
    return _Work(operation(*copies, **options), tensor, copies[0])


@contextmanager
def hidden_until_waited_for() -> Iterator[None]:
    """Open a block in which nothing can be read of a tensor that an asynchronous operation writes."""
    with ExitStack() as stack:
        for module, name in ((dist, "all_reduce"), (torch_adapter, "all_gather_single")):
            stack.enter_context(mock.patch.object(module, name, partial(_post, getattr(module, name))))
        yield
