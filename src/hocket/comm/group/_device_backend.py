"""A backend: the transport for one kind of device in one group, with the queue that keeps its operations in order."""

from typing import Any

import torch
from torch.distributed import Work

from ..shm import cuda_ipc as _cuda_ipc
from ..transport import Transport
from ._runner import Action, Runner


class DeviceBackend:
    """Runs operations on CPU tensors, or on CUDA tensors of one GPU that the ranks share.

    `device` is None for the CPU.
    """

    def __init__(self, transport: Transport, runner: Runner, device: torch.device | None = None) -> None:
        self.transport = transport
        self.runner = runner
        self.device = device
        self._side = torch.cuda.Stream(device) if device is not None else None  # type: ignore[no-untyped-call]

    def submit(
        self, kind: str, opts: Any, results: list[torch.Tensor], payload: Any, action: Action, written: bool = True
    ) -> Work:
        """See Runner.submit; on a GPU the operation comes after what the current stream holds."""
        if self.device is not None and self._side is not None:
            action = _cuda_ipc.beside_stream(action, self.device, self._side)
        return self.runner.submit(kind, opts, results, payload, action, written)


def empty_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory for a copy of a CUDA tensor: pinned, which torch keeps for the next message, where it can be.

    Fresh pages cost more than the copy: a message of 64 MiB took 95 ms on an H100, 13 times as long as its bytes need.
    """
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:  # the system pins no more
        return torch.empty_like(tensor, device="cpu")


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a CUDA tensor in such memory, after what the current stream holds."""
    staged = empty_on_host(tensor).copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return staged


class HostStagedWork(Work):
    """A send or receive of a CUDA tensor through a copy on the host and the engine's own work."""

    def __init__(self, inner: Any, staged: torch.Tensor, target: torch.Tensor | None) -> None:
        super().__init__()
        self._inner = inner
        self._staged = staged
        self._target = target

    def wait(self, timeout: Any = None) -> bool:
        """Block until the transfer is over and the tensor is in place."""
        done = bool(self._inner.wait() if timeout is None else self._inner.wait(timeout))
        if self._target is not None:
            self._target.copy_(self._staged)
            self._target = None
        return done

    def is_completed(self) -> bool:
        """Return whether the transfer is over; then what was received is in place, as if `wait` had been called."""
        return bool(self._inner.is_completed()) and self.wait()

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())
