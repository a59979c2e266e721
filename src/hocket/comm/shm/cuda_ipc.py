"""The CUDA transport for ranks that share one GPU, which NCCL refuses: peers' slots mapped through CUDA IPC.

It is the shared-memory transport with its slots in device memory. Slots come straight from cudaMalloc (not from torch's
allocator, whose segments cannot always be exported) and torch sees them through `__cuda_array_interface__`. Before a
phase is published the stream is drained, so that a peer that reads the phase counter finds the data.
"""

import ctypes
import functools
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ..transport import CommError
from . import bootstrap as _bootstrap
from ._channel import Channel
from ._sizes import Sizes

CUDA_SIZES = Sizes(
    slot=32 * 2**20,
    one_shot=2**20,
    piece=16 * 2**20,
    block=24 * 2**20,
    chain=2**62,  # one GPU does everybody's work: nothing to share out in a pipeline
    direct=2**62,  # device buffers are not registered
    direct_piece=2**20,
)
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t: 64 opaque bytes, passed by value."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


class _Bytes:
    """Device memory as the CUDA array interface (version 3) describes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@functools.cache
def _runtime() -> Any:
    """Return the CUDA runtime that torch has loaded."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"(/\S*libcudart[^\s/]*\.so[^\s]*)", maps)
    if found is None:
        raise CommError("this build of torch has no shared CUDA runtime, so ranks cannot share a GPU through it")
    runtime = ctypes.CDLL(found.group(1))
    runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]
    runtime.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
    runtime.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_void_p]
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime


def _check(code: int, what: str) -> None:
    if code:
        raise CommError(f"{what} failed: {_runtime().cudaGetErrorString(code).decode()}")


def _allocate(nbytes: int) -> tuple[int, bytes]:
    """Device memory for the life of the process, and the handle by which a peer opens it."""
    address, handle = ctypes.c_void_p(), _Handle()
    _check(_runtime().cudaMalloc(ctypes.byref(address), nbytes), f"cudaMalloc of {nbytes} bytes")
    _check(_runtime().cudaIpcGetMemHandle(ctypes.byref(handle), address), "cudaIpcGetMemHandle")
    return int(address.value or 0), ctypes.string_at(ctypes.byref(handle), 64)


def _open(raw: bytes) -> int:
    address, handle = ctypes.c_void_p(), _Handle()
    ctypes.memmove(ctypes.byref(handle), raw, 64)
    _check(_runtime().cudaIpcOpenMemHandle(ctypes.byref(address), handle, _LAZY_PEER_ACCESS), "cudaIpcOpenMemHandle")
    return int(address.value or 0)


class CudaChannel(Channel):
    """A Channel whose slots lie in the memory of one GPU."""

    sizes = CUDA_SIZES

    def __init__(self, host: Channel, slots: list[torch.Tensor], device: torch.device) -> None:
        self._device_slots = slots
        self._device = device
        super().__init__(host.name, host.rank, host.peers, host.global_ranks)

    def _make_slots(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        slot_nbytes = self.sizes.slot
        return [s[:slot_nbytes] for s in self._device_slots], [s[slot_nbytes:] for s in self._device_slots]

    def phase(self) -> None:
        """Drain the stream, then meet the others."""
        torch.cuda.current_stream(self._device).synchronize()
        super().phase()


def shared_with(store: Any, rank: int, peer: int, timeout: timedelta, device: torch.device) -> bool:
    """Return whether a rank has the same GPU as its peer in a message, of whom alone it waits to hear."""
    mine = str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"hocket/gpu/{rank}", mine)
    store.wait([f"hocket/gpu/{peer}"], timeout)
    return bool(store.get(f"hocket/gpu/{peer}").decode() == mine)


def connect(
    store: Any, name: str, rank: int, size: int, timeout: timedelta, global_ranks: list[int], device: torch.device
) -> CudaChannel | None:
    """Open device slots among ranks that share one GPU; None if every rank has a GPU of its own (NCCL's case).

    All ranks of the group must come here, at their first operation on a CUDA tensor. Raises CommError: ranks share GPUs
    in a way that no transport serves.
    """
    store.set(f"hocket/gpu/{rank}", str(torch.cuda.get_device_properties(device).uuid))
    keys = [f"hocket/gpu/{r}" for r in range(size)]
    store.wait(keys, timeout)
    gpus = set(store.multi_get(keys))
    if len(gpus) == size:
        return None
    if len(gpus) > 1:
        raise CommError(
            f"{size} ranks of group {name!r} share {len(gpus)} GPUs; give every rank a GPU of its own (NCCL) or all "
            "ranks the same one (CUDA IPC)"
        )
    host = _bootstrap.connect(store, f"{name}-cuda", rank, size, timeout, global_ranks)
    if host is None:
        raise CommError(f"ranks of group {name!r} share a GPU but not a host's shared memory")
    with torch.cuda.device(device):
        nbytes = 2 * CUDA_SIZES.slot
        address, handle = _allocate(nbytes)
        store.set(f"hocket/ipc/{rank}", handle.hex())
        keys = [f"hocket/ipc/{r}" for r in range(size)]
        store.wait(keys, timeout)
        handles = [bytes.fromhex(raw.decode()) for raw in store.multi_get(keys)]
        addresses = [address if r == rank else _open(h) for r, h in enumerate(handles)]
        slots = [torch.as_tensor(_Bytes(a, nbytes), device=device) for a in addresses]
    return CudaChannel(host, slots, device)


def beside_stream(
    action: Callable[[float], str], device: torch.device, side: torch.cuda.Stream
) -> Callable[[float], str]:
    """Run `action` on the stream `side`, after what the caller's stream holds now and before `action` returns."""
    posted = torch.cuda.Event()  # type: ignore[no-untyped-call]
    posted.record(torch.cuda.current_stream(device))

    def run(timeout_s: float) -> str:
        with torch.cuda.device(device), torch.cuda.stream(side):
            side.wait_event(posted)
            path = action(timeout_s)
            side.synchronize()
            return path.replace("shm", "cuda-ipc")

    return run
