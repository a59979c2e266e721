"""Which chunk lies where while an MSCCL program runs, and which value of it is the latest: operations become messages.

MSCCL's buffers become the one buffer that a rank has in a schedule, with one value of each chunk.
"""

from dataclasses import dataclass

import numpy as np

from ._collective import ScheduleError
from ._msccl_program import LOCAL, RECEIVES, REDUCES, SENDS, MscclOperation, MscclPlaces, Place

Touches = dict[tuple[int, int], list[tuple[MscclOperation, bool]]]
"""By (gpu, chunk) the operations that read (False) or wrote it, in their order."""


@dataclass(slots=True)
class MscclMessage:
    """A transfer under construction: read by one operation, written by another."""

    source: int
    destination: int
    chunk: int
    reduce: bool
    read: MscclOperation
    written: MscclOperation


class MscclBuffers:
    """The memory of all ranks; see the head of this module."""

    def __init__(self, places: MscclPlaces, chunks: int) -> None:
        self._places = places
        self._held: dict[tuple[int, Place], int] = {}  # (gpu, place) -> chunk
        self._current: dict[tuple[int, int], set[Place]] = {}  # (gpu, chunk) -> places with its latest value
        self._parked: dict[tuple[int, Place], MscclMessage] = {}  # arrived in scratch, not yet reduced
        self._touches: Touches = {}
        rows = np.arange(chunks) // places.pieces
        for gpu in range(places.collective.world):
            for chunk in np.flatnonzero(places.collective.before(np.array(gpu), rows)).tolist():
                self._current[gpu, chunk] = {places.begin(gpu, chunk)}
                self._held[gpu, places.begin(gpu, chunk)] = chunk

    def follow(
        self, ordered: list[MscclOperation], sent: dict[int, MscclOperation]
    ) -> tuple[list[MscclMessage], Touches]:
        """Let operations happen in their order.

        `sent` has the send of each receive; see `hocket.schedule._msccl_program.run`.

        Returns:
            The messages, one a chunk, and what touched each chunk at each rank.

        Raises:
            ScheduleError: chunks that are never used, or of which a rank needs two values at once.
        """
        messages: list[MscclMessage] = []
        carried: dict[tuple[int, int], int] = {}  # (order of a send, offset) -> chunk
        for one in ordered:
            for k in range(one.count if one.verb != "nop" else 0):
                source = self._places.one_name(one.gpu, (one.source[0], one.source[1] + k))
                target = self._places.one_name(one.gpu, (one.target[0], one.target[1] + k))
                if one.verb in RECEIVES:
                    sender = sent[one.order]
                    chunk = carried[sender.order, k]
                    reduce = one.verb in REDUCES
                    messages.append(MscclMessage(sender.gpu, one.gpu, chunk, reduce, sender, one))
                    self._arrive(one, messages[-1], target)
                elif one.verb in LOCAL:
                    self._local(one, source, target)
                if one.verb in SENDS:
                    place = target if one.verb in RECEIVES else source
                    carried[one.order, k] = self._read(one, place)
        for (_, place), message in self._parked.items():
            raise ScheduleError(f"{message.written}: what arrives in {place[0]}[{place[1]}] is never used")
        return messages, self._touches

    def _arrive(self, one: MscclOperation, message: MscclMessage, place: Place) -> None:
        gpu, chunk = one.gpu, message.chunk
        there = self._current.get((gpu, chunk))
        if there and place not in there and not message.reduce and place[0] == "s":
            self._parked[gpu, place] = message  # the rank has a value of its own; this one is to be reduced into it
            return
        self._held[gpu, place] = chunk
        self._current[gpu, chunk] = {place}
        self._touch(one, chunk, writes=True)

    def _local(self, one: MscclOperation, source: Place, target: Place) -> None:
        parked = self._parked.pop((one.gpu, source), None)
        if parked is not None:
            parked.reduce = one.verb == "re"
            parked.written = one
            self._held[one.gpu, target] = parked.chunk
            self._current[one.gpu, parked.chunk] = {target}
            self._touch(one, parked.chunk, writes=True)
            return
        if one.verb == "re":
            raise ScheduleError(f"{one}: reduces {source[0]}[{source[1]}], which has not just arrived from a peer")
        chunk = self._read(one, source)
        self._held[one.gpu, target] = chunk
        self._current[one.gpu, chunk].add(target)

    def _read(self, one: MscclOperation, place: Place) -> int:
        chunk = self._held.get((one.gpu, place))
        if chunk is None or place not in self._current.get((one.gpu, chunk), ()):
            raise ScheduleError(
                f"{one}: reads {place[0]}[{place[1]}], which holds nothing, or a value that the rank has replaced "
                "elsewhere; a schedule has one value of a chunk at each rank"
            )
        self._touch(one, chunk, writes=False)
        return chunk

    def _touch(self, one: MscclOperation, chunk: int, *, writes: bool) -> None:
        self._touches.setdefault((one.gpu, chunk), []).append((one, writes))
