"""The mode in which a divided model runs: it sees calls of torch functions on tensors that are not divided, too."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hocket._program import program_line

from . import _engine, _sharded_tensor, torch_adapter
from ._call import Local, OperatorCall, ShardPeers
from ._decompose import apply_rule
from ._engine import as_operand, tell
from ._sharded_tensor import ShardedTensor, ShardingError, gathered
from ._trees import leaves, mapped

_COPYING = frozenset([torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor, torch.Tensor.new])
_OWN = (__file__, _engine.__file__, _sharded_tensor.__file__)  # through which a call of the program goes


def _homes() -> list[str]:
    """Return how names of files of torch begin, and of this package."""
    return [f"{Path(module.__file__ or '').parent}{os.sep}" for module in (torch, sys.modules[__name__.split(".")[0]])]


def _asked_by_package() -> bool:
    """Return whether a call of torch comes from this package, which knows what it gets, and not from the program."""
    of_torch, of_package = _homes()
    names = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
    asking = next((name for name in names if name not in _OWN and not name.startswith(of_torch)), "")
    return asking.startswith(of_package)


class WholeBatchNorms(TorchFunctionMode):
    """Has batch norm of replicated tensors made by the peers, whose ranks may share its statistics.

    Copies that torch makes without asking the tensor (`torch.tensor(x)`) are made of the full one. Derivatives are
    refused where ranks exchange rows: the gradients of one rank are addends, as many as there are ranks.

    Args:
        peers: the ranks.
    """

    def __init__(self, peers: ShardPeers) -> None:
        super().__init__()
        self._peers = peers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.as_tensor and type(args[0] if args else kwargs.get("data")) is ShardedTensor:
            return _as_tensor(*args, **kwargs)
        derives = func is torch.autograd.grad and self._peers.exchanges and not _asked_by_package()
        if derives and not any(map(torch_adapter.of_transform, leaves((args, kwargs)))):
            raise ShardingError(
                f"{program_line()}: autograd.grad takes derivatives while samples are divided among {self._peers.size} "
                "ranks, and each would have a part of them: say spatial_parallel_degree = 1"
            )
        if func in _COPYING:
            args, kwargs = mapped(gathered, (args, kwargs))
            return func(*args, **kwargs)
        if func is not torch.nn.functional.batch_norm or ShardedTensor in types:
            return func(*args, **kwargs)
        peers = self._peers
        operands = mapped(as_operand, tuple(args)), mapped(as_operand, kwargs)
        call = OperatorCall("batch_norm", *operands, peers.size, peers.rank, peers.exchanges, func)
        outcome = apply_rule(call)
        tell(peers, "batch_norm", args, kwargs, "")
        return Local(peers, func).result(call, outcome)


def _as_tensor(data: torch.Tensor, dtype: Any = None, device: Any = None) -> torch.Tensor:
    """Return what `torch.as_tensor` makes of a tensor: the tensor itself, where it is of that type and there."""
    return data.to(device=device or data.device, dtype=dtype or data.dtype)
