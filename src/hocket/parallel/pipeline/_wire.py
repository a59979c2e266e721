"""Messages between stages on different ranks, over the pipeline's process group.

The first time that micro-batches of some shapes pass a cut, the sender describes what it sends; from then on the
receiver knows and can post its receives before the sender has computed. Both sides know from the batch, which every
rank has, whether it is the first time. Messages between two ranks go in the order of the schedule on both sides. Every
wait has the deadline of the process group, and ends in its error if the peer has died.

Ranks that share tensors hold the same values at a cut. Where those of a stage are on one host and the next stage on
another, each sends its part of them, and the receivers gather the parts inside their host (Narayanan et al., Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021, section 4.1).
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from hocket import comm
from hocket.planner import LEAST_PART_NBYTES

from ..mesh import World
from . import _values

Tensor = torch.Tensor
Key = tuple[Any, ...]

_TAG: Final = 0x5049  # "PI": apart from a user's own sends and receives


class _MessagePart:
    """A part of a tensor that is on its way here, while other ranks get the others."""

    def __init__(self, work: Any, part: Tensor, whole: Tensor, group: Any) -> None:
        self._work = work
        self._part = part
        self._whole = whole
        self._group = group

    def wait(self) -> None:
        """Wait until this rank's part has arrived."""
        self._work.wait()

    def gather(self) -> None:
        """Fill the tensor; a collective operation."""
        own = self._part.view(torch.uint8).clone()  # of any type
        dist.all_gather_into_tensor(self._whole.view(-1).view(torch.uint8), own, group=self._group)


class StageWire:
    """This rank's messages to and from the other ranks of a pipeline.

    Args:
        world: the ranks of the pipeline.
        fixed_shapes: whether shapes that cross a cut follow from the shapes of the batch. If not, every message is
            described anew, which costs one more small message each.
        alike: the ranks that hold the same values at each cut and send a part each; None where each sends all.
    """

    def __init__(self, world: World, *, fixed_shapes: bool = True, alike: World | None = None) -> None:
        self._world = world
        self._alike = alike
        self._fixed = fixed_shapes
        self._sent: dict[tuple[int, Key], bytes] = {}
        self._known: dict[tuple[int, Key], Any] = {}
        self._under_way: list[tuple[Any, Tensor]] = []
        # Whether messages of gradients say which of them there are; those of this step, before that is known.
        self._says: dict[tuple[int, Key], bool] = {}
        self._new: dict[tuple[int, Key], bool] = {}

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """Start sending tensors to a rank of the pipeline."""
        self._under_way = [(work, tensor) for work, tensor in self._under_way if not work.is_completed()]
        for tensor in _values.dense(tensors):
            work = dist.isend(tensor, group=self._world.group, group_dst=peer, tag=_TAG)
            if work is not None:
                self._under_way.append((work, tensor))

    def receive(self, peer: int, buffers: Sequence[Tensor]) -> list[Any]:
        """Start receiving into `buffers`; wait for what is returned with `wait`."""
        group = self._world.group
        return [dist.irecv(buffer.detach(), group=group, group_src=peer, tag=_TAG) for buffer in buffers]

    def send_values(self, peer: int, key: Key, values: Any) -> None:
        """Send a structure, with its description if the receiver cannot know it.

        Raises:
            ValueError: its shapes are not those that went with `key` before.
        """
        mark = _values.fingerprint(values)
        before = self._sent.get((peer, key))
        if before is None or not self._fixed:
            self._sent[peer, key] = mark
            self._send_object(peer, _values.described(values))
        elif before != mark:
            raise ValueError(
                f"what stage {key[0] - 1} sends to stage {key[0]} has other shapes, types or plain values than for an "
                "earlier micro-batch of the same shapes, so the receiver cannot know them. Split elsewhere "
                "with split= (names of modules that begin a stage), or say pipeline_parallel_degree = 1; a Pipeline of "
                "your own has every message described by fixed_shapes=False"
            )
        self.send_alike(peer, _values.tensors_of(values))

    def send_alike(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """Start sending what all ranks that share tensors hold: this rank's part of it, or all."""
        self.send(peer, [self._own(tensor) for tensor in _values.dense(tensors)])

    def receive_alike(self, peer: int, buffers: Sequence[Tensor]) -> list[Any]:
        """Start receiving it into contiguous `buffers`; wait for what is returned with `wait`."""
        wholes = [buffer.detach() for buffer in buffers]
        parts = [self._own(whole) for whole in wholes]
        works = self.receive(peer, parts)
        for number, (part, whole) in enumerate(zip(parts, wholes, strict=True)):
            if part is not whole and self._alike is not None:
                works[number] = _MessagePart(works[number], part, whole, self._alike.group)
        return works

    def _own(self, tensor: Tensor) -> Tensor:
        """Return the part of a contiguous tensor that this rank sends or receives."""
        if self._alike is None or tensor.nbytes < LEAST_PART_NBYTES or tensor.numel() % self._alike.size:
            return tensor
        return tensor.view(-1).chunk(self._alike.size)[self._alike.rank]

    def send_gradients(self, peer: int, key: Key, tensors: Sequence[Tensor], there: Sequence[bool]) -> None:
        """Start sending gradients, with zeros for those that are not `there`.

        In the first step of a key it is said which are, and later if one was not.
        """
        if tensors and self._says.get((peer, key), True):
            self._note(peer, key, all(there))
            self.send(peer, [torch.tensor(there, dtype=torch.uint8, device=self._world.device)])
        self.send_alike(peer, tensors)

    def receive_gradients(self, peer: int, key: Key, buffers: Sequence[Tensor]) -> Callable[[], list[Tensor | None]]:
        """Start receiving gradients into `buffers`; what is returned waits, and gives None for those not there."""
        says = bool(buffers) and self._says.get((peer, key), True)
        there = torch.ones(len(buffers), dtype=torch.uint8, device=self._world.device)
        works = [*(self.receive(peer, [there]) if says else ()), *self.receive_alike(peer, buffers)]

        def arrived() -> list[Tensor | None]:
            self.wait(works)
            if not says:
                return [*buffers]
            known = there.tolist()
            self._note(peer, key, all(known))
            return [buffer if one else None for buffer, one in zip(buffers, known, strict=True)]

        return arrived

    def _note(self, peer: int, key: Key, whole: bool) -> None:
        self._new[peer, key] = self._new.get((peer, key), True) and whole

    def settle(self) -> None:
        """End a step: both sides know now which gradients there were."""
        for one, whole in self._new.items():
            self._says.setdefault(one, not whole)
        self._new = {}

    def knows(self, peer: int, key: Key) -> bool:
        """Return whether `receive_values` can begin without waiting for a description."""
        return self._fixed and (peer, key) in self._known

    def receive_values(self, peer: int, key: Key, device: torch.device) -> tuple[Any, list[Any]]:
        """Start receiving a structure: return it, and what to `wait` for before it is used."""
        description = self._known.get((peer, key)) if self._fixed else None
        if description is None:
            description = self._known[peer, key] = self._receive_object(peer)
        buffers = _values.empty_for(description, device)
        return _values.filled(description, buffers), self.receive_alike(peer, buffers)

    def wait(self, works: Sequence[Any]) -> None:
        """Wait until messages have arrived, or raise what the process group does at a deadline or a death."""
        if not works:
            return
        begin_s = time.perf_counter()
        for work in works:
            work.wait()
        comm.announce_message(self._world.size, begin_s, time.perf_counter())
        for work in works:
            if isinstance(work, _MessagePart):
                work.gather()

    def broadcast_values(self, root: int, key: Key, values: Any, device: torch.device) -> Any:
        """Return the structure that rank `root` gives as `values`, on every rank; a collective operation."""
        if self._world.rank != root:
            values, works = self.receive_values(root, key, device)
            self.wait(works)
            return values
        for peer in range(self._world.size):
            if peer != root:
                self.send_values(peer, key, values)
        self.drain()
        return values

    def drain(self) -> None:
        """Wait until all that was sent is on its way."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way = []

    def _send_object(self, peer: int, value: Any) -> None:
        raw = torch.frombuffer(bytearray(_values.pickled(value)), dtype=torch.uint8).to(self._world.device)
        self.send(peer, [torch.tensor([raw.numel()], dtype=torch.int64, device=self._world.device), raw])

    def _receive_object(self, peer: int) -> Any:
        length = torch.empty(1, dtype=torch.int64, device=self._world.device)
        self.wait(self.receive(peer, [length]))
        raw = torch.empty(int(length), dtype=torch.uint8, device=self._world.device)
        self.wait(self.receive(peer, [raw]))
        return pickle.loads(raw.cpu().numpy().tobytes())
