"""The CUDA transport for ranks that share one GPU, which NCCL refuses: peers' slots mapped through CUDA IPC.

It is the shared-memory transport with its slots in device memory. Slots come straight from cudaMalloc (not from torch's
allocator, whose segments cannot always be exported) and torch sees them through `__cuda_array_interface__`. Before a
phase is published the stream is drained, so that a peer that reads the phase counter finds the data.
"""

import ctypes
import functools
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import torch_adapter
from ..transport import CollectiveTimeoutError, CommError, Membership
from . import bootstrap as _bootstrap
from ._channel import Channel
from ._peers import Peers
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
    """Return device memory and the handle by which a peer opens it."""
    _free_released()
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

    def __init__(self, host: Channel, addresses: list[int], device: torch.device) -> None:
        nbytes = 2 * self.sizes.slot
        self._device_slots = [torch.as_tensor(_Bytes(address, nbytes), device=device) for address in addresses]
        self._addresses = addresses
        self._device = device
        super().__init__(host.name, host.rank, host.peers, host.global_ranks)

    def _make_slots(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        slot_nbytes = self.sizes.slot
        return [s[:slot_nbytes] for s in self._device_slots], [s[slot_nbytes:] for s in self._device_slots]

    def phase(self) -> None:
        """Drain the stream, then meet the others."""
        torch.cuda.current_stream(self._device).synchronize()
        super().phase()

    def release(self) -> None:
        """Unmap the peers' memory and tell them; this rank's own is freed when all have done so."""
        if self._addresses and self.peers[self.rank].pid == os.getpid():
            with torch.cuda.device(self._device):
                for rank in self.others:
                    _runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(self._addresses[rank]))
            _released.append((self._watch, self._device, self._addresses[self.rank]))
            self._addresses = []
            self._watch.release()
            _free_released()


_released: list[tuple[Peers, torch.device, int]] = []  # peers that may still read the memory at an address
_freeing = threading.Lock()


def _free_released() -> None:
    """Free the memory of groups that are over, if no rank has it mapped: freeing earlier is undefined."""
    with _freeing:
        for one in tuple(_released):
            peers, device, address = one
            if peers.all_released():
                with torch.cuda.device(device):
                    _runtime().cudaFree(ctypes.c_void_p(address))
                _released.remove(one)


def connect(at: Membership, device: torch.device) -> CudaChannel | None:
    """Open device slots among ranks that share one GPU; None if every rank has a GPU of its own (NCCL's case).

    All ranks of the group must come here, at their first collective on a CUDA tensor.

    Raises:
        CollectiveTimeoutError: not all ranks have come in time.
        CommError: ranks share GPUs in a way that no transport serves, or one of them cannot open the others' memory.
    """
    name, size, everyone = at.name, at.size, range(at.size)
    gpus = set(_exchanged(at, "gpu", everyone, _uuid(device)))
    if len(gpus) == size:
        return None
    if len(gpus) > 1:
        raise CommError(
            f"{size} ranks of group {name!r} share {len(gpus)} GPUs; give every rank a GPU of its own (NCCL) or all "
            "ranks the same one (CUDA IPC)"
        )
    host = _bootstrap.connect(at._replace(name=f"{name}-cuda"))
    if host is None:
        raise CommError(f"ranks of group {name!r} share a GPU but not a host's shared memory")
    with torch.cuda.device(device):
        try:
            address, handle = _allocate(2 * CUDA_SIZES.slot)
            mine = handle.hex()
        except CommError as error:
            mine = _REFUSED + str(error)
        handles = _exchanged(at, "ipc", everyone, mine)
        problem = _refusal(handles, at.numbers)
        if problem is None:
            try:
                addresses = [address if r == at.rank else _open(bytes.fromhex(h)) for r, h in enumerate(handles)]
                mine = ""
            except CommError as error:
                mine = _REFUSED + str(error)
            problem = _refusal(_exchanged(at, "ipc-verdict", everyone, mine), at.numbers)
    if problem is not None:
        raise CommError(f"ranks of group {name!r} cannot share GPU {device.index} through CUDA IPC: {problem}")
    return CudaChannel(host, addresses, device)


def share_gpu(at: Membership, peer: int, device: torch.device) -> bool:
    """Return whether `peer` is on this rank's GPU; both come here, at the first message between them.

    Raises:
        CollectiveTimeoutError: the peer has not come in time.
    """
    return len(set(_exchanged(at, "gpu", (at.rank, peer), _uuid(device)))) == 1


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


_REFUSED = "refused: "


def _refusal(answers: list[str], numbers: Sequence[int]) -> str | None:
    for rank, answer in zip(numbers, answers, strict=True):
        if answer.startswith(_REFUSED):
            return f"rank {rank}: {answer.removeprefix(_REFUSED)}"
    return None


def _exchanged(at: Membership, what: str, ranks: Sequence[int], mine: str) -> list[str]:
    """Return what each of `ranks` says, this rank's own included; `what` is how the store calls it, in one word."""
    store, name, rank, _, timeout, global_ranks = at
    store.set(f"hocket/{what}/{rank}", mine)
    keys = {r: f"hocket/{what}/{r}" for r in ranks}
    try:
        torch_adapter.wait_for(store, list(keys.values()), timeout)
    except RuntimeError as error:  # of a time-out stores have several errors
        missing = tuple(r for r, key in keys.items() if not store.check([key]))
        if not missing:
            raise
        names = ", ".join(str(global_ranks[r]) for r in missing)
        raise CollectiveTimeoutError(
            f"rank {global_ranks[rank]} of group {name!r} waited {timeout.total_seconds():.0f} s for rank {names} at "
            "the group's first operation on a GPU: all ranks of a group must take part in its collectives, with "
            "tensors on the same kind of device",
            missing,
            tuple(global_ranks[r] for r in missing),
        ) from error
    return [raw.decode() for raw in store.multi_get(list(keys.values()))]


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
