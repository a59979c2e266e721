"""From a stream of bytes to frames, without a copy of what is long, and without trust in any of it."""

from collections.abc import Callable, Iterator
from typing import Final

from ._codec import DATA_HEAD, HEADER, check_length, decode
from ._frames import MAGIC, Data, Frame, FrameType, ProtocolError

_STAGE_NBYTES: Final = 1 << 16

Place = Callable[[Data], memoryview]
"""Says where the payload of a DATA frame shall lie: as many writable bytes as it has. May raise ProtocolError."""


class Decoder:
    """Reads frames of one direction of one connection.

    Fill `buffers()` in order with what arrives, say how much that was with `filled`, and take the frames out.
    """

    def __init__(self, expected: frozenset[FrameType], segment_nbytes: int) -> None:
        self.expected = expected  # types of frames that may come now; may be changed between frames
        self.segment_nbytes = segment_nbytes  # the longest payload of a DATA frame
        self._stage = memoryview(bytearray(_STAGE_NBYTES))
        self._begin = 0
        self._end = 0
        self._data: Data | None = None
        self._payload = memoryview(b"")  # what is still missing of the payload of `_data`

    def buffers(self) -> list[memoryview]:
        """Return where the next bytes belong: never empty."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin and self._end == _STAGE_NBYTES:
            rest = self._end - self._begin
            self._stage[:rest] = bytes(self._stage[self._begin : self._end])
            self._begin, self._end = 0, rest
        return [self._payload, self._stage[self._end :]] if self._payload else [self._stage[self._end :]]

    @property
    def missing_nbytes(self) -> int:
        """What the payload that has begun still lacks."""
        return len(self._payload)

    @property
    def begun_nbytes(self) -> int:
        """What has come of frames that are not complete."""
        payload_nbytes = 0 if self._data is None else self._data.nbytes - len(self._payload)
        return payload_nbytes + self._end - self._begin

    def filled(self, nbytes: int) -> None:
        """Say that so many bytes have been put into `buffers()`."""
        direct = min(nbytes, len(self._payload))
        self._payload = self._payload[direct:]
        self._end += nbytes - direct

    def frames(self, place: Place) -> Iterator[Frame]:
        """Return the frames that are complete. A DATA frame comes out once its payload lies where `place` said.

        Raises:
            ProtocolError: what came is no frame that may come now; the connection must end.
        """
        while True:
            if self._data is not None:
                if self._payload:
                    return
                done, self._data = self._data, None
                yield done
            held = self._end - self._begin
            if held < HEADER.size:
                return
            magic, number, group, length = HEADER.unpack_from(self._stage, self._begin)
            kind = self._check(magic, number, length)
            if kind == FrameType.DATA:
                if held < DATA_HEAD.size:
                    return
                sequence, offset = DATA_HEAD.unpack_from(self._stage, self._begin)[4:]
                self._begin += DATA_HEAD.size
                nbytes = length - (DATA_HEAD.size - HEADER.size)
                self._start(Data(group, sequence, offset, nbytes), place)
                continue
            if held < HEADER.size + length:
                return
            body = bytes(self._stage[self._begin + HEADER.size : self._begin + HEADER.size + length])
            self._begin += HEADER.size + length
            yield decode(kind, group, body)

    def _check(self, magic: int, number: int, length: int) -> FrameType:
        if magic != MAGIC:
            raise ProtocolError(f"a frame that begins with byte {magic:#04x}")
        try:
            kind = FrameType(number)
        except ValueError:
            raise ProtocolError(f"a frame of type {number}") from None
        if kind not in self.expected:
            raise ProtocolError(f"a {kind.name} frame, which may not come now")
        check_length(kind, length, self.segment_nbytes)
        return kind

    def _start(self, data: Data, place: Place) -> None:
        target = place(data)
        assert len(target) == data.nbytes
        here = min(data.nbytes, self._end - self._begin)
        target[:here] = self._stage[self._begin : self._begin + here]
        self._begin += here
        self._data = data
        self._payload = target[here:]
