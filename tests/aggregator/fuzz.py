"""Fuzzing of what an aggregator reads, by hand, with coverage as the guide: `pip install atheris`, then

    python tests/aggregator/fuzz.py -max_total_time=600 [CORPUS]

One input is a stream of one client's bytes, cut at places that its first bytes choose. It goes through the decoder, and
what comes out through a connection that has proved itself, with all state of groups and operations behind it. Anything
but a ProtocolError is a finding; so are buffers without space, and a frame that its own encoding does not give again.
"""

import itertools
import logging
import socket
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["hocket.aggregator"]):
    from hocket.aggregator import Aggregator, ElementType, Kind, Level, Limits, Operator
    from hocket.aggregator import _codec as codec
    from hocket.aggregator import _frames as wire
    from hocket.aggregator._connection import Connection
    from hocket.aggregator._decoder import Decoder

TOKEN = b"a token of a test, long enough"
LIMITS = Limits(window_nbytes=1 << 14, segment_nbytes=1 << 12, nbytes=1 << 20, groups=8, operations=4)
logging.disable(logging.CRITICAL)
server = Aggregator(("127.0.0.1", 0), [TOKEN], limits=LIMITS)


def one_input(raw: bytes) -> None:
    """A stream, in pieces of as many bytes as its first eight say in turn."""
    sizes = itertools.cycle([1 + size for size in raw[:8]] or [1])
    stream = raw[8:]
    pieces = []
    while stream:
        size = next(sizes)
        pieces.append(stream[:size])
        stream = stream[size:]
    decode(pieces)
    converse(pieces)


def decode(pieces: list[bytes]) -> None:
    decoder = Decoder(frozenset(wire.FrameType), LIMITS.segment_nbytes)
    try:
        for piece in pieces:
            feed(decoder, piece)
            for frame in decoder.frames(lambda data: memoryview(bytearray(data.nbytes))):
                if isinstance(frame, wire.Data):
                    continue
                raw = codec.encode(frame)
                kind, group, body = wire.FrameType(raw[1]), int.from_bytes(raw[2:4], "little"), raw[8:]
                assert repr(codec.decode(kind, group, body)) == repr(frame)
    except wire.ProtocolError:
        return


def converse(pieces: list[bytes]) -> None:
    near, far = socket.socketpair()
    connection = Connection(near, "fuzz", {}, LIMITS, server._directory, lambda link: None)
    connection.known, connection.key, connection.token = True, b"key", TOKEN
    connection.decoder.expected = wire.CLIENT_FRAMES
    try:
        for piece in pieces:
            feed(connection.decoder, piece)
            for frame in connection.decoder.frames(connection.place):
                connection.handle(frame)
            connection.drop_queue()  # as if the socket had taken all
            server._directory.indebted.clear()
            for group, _ in connection.places.values():
                group.send_credits()
                group.check(0.0)
    except wire.ProtocolError:
        pass
    finally:
        connection.lost("the input has ended")
        far.close()
    assert server._directory._reserved_nbytes == 0
    assert not server._directory._groups
    assert not server._directory._forming


def feed(decoder: Decoder, piece: bytes) -> None:
    while piece:
        room = next(buffer for buffer in decoder.buffers() if len(buffer))
        taken = min(len(room), len(piece))
        room[:taken] = piece[:taken]
        decoder.filled(taken)
        piece = piece[taken:]
        if decoder.begun_nbytes > 1 << 15:
            return


def seeds() -> list[bytes]:
    """Conversations that make sense, for it to start from: a client alone in its group."""
    join = codec.encode(wire.Join(1, 1, (Level(1, 0, 0, 1),), b"g", b"me"))
    found = []
    for kind, operator, element in (
        (Kind.ALL_REDUCE, Operator.SUM, ElementType.FLOAT32),
        (Kind.ALL_REDUCE, Operator.MINLOC, ElementType.BFLOAT16),
        (Kind.REDUCE, Operator.LAND, ElementType.FLOAT16),
        (Kind.REDUCE_SCATTER, Operator.BXOR, ElementType.INT64),
        (Kind.ALL_GATHER, Operator.NONE, ElementType.UINT8),
        (Kind.BROADCAST, Operator.NONE, ElementType.UINT8),
        (Kind.BARRIER, Operator.NONE, ElementType.UINT8),
    ):
        nbytes = 0 if kind == Kind.BARRIER else 64
        stream = join + codec.encode(wire.Open(1, 1, kind, operator, element, 0, nbytes, 32, 1000))
        for offset in range(0, nbytes, 32):
            stream += codec.data_head(1, 1, offset, 32) + bytes(32)
        stream += codec.encode(wire.Ack(1, 1)) + codec.encode(wire.Ping(7)) + codec.encode(wire.Leave(1))
        found.append(bytes([3, 200, 7, 90, 255, 1, 24, 60]) + stream)
    two = codec.encode(wire.Join(1, 2, (Level(2, 0, 0, 1),), b"h", b"a"))
    two += codec.encode(wire.Join(2, 2, (Level(2, 1, 1, 1),), b"h", b"b"))
    for group in (1, 2):
        two += codec.encode(wire.Open(group, 1, Kind.ALL_REDUCE, Operator.MAX, ElementType.INT16, 0, 16, 16, 1000))
        two += codec.data_head(group, 1, 0, 16) + bytes(16)
    return [*found, bytes(8) + two, bytes([255] * 8) + two]


if __name__ == "__main__":
    corpus = next((word for word in sys.argv[1:] if not word.startswith("-")), None) or tempfile.mkdtemp()
    for number, seed in enumerate(seeds()):
        Path(corpus, f"seed{number}").write_bytes(seed)
        one_input(seed)
    words = [word for word in sys.argv[1:] if word.startswith("-")]
    atheris.Setup([sys.argv[0], *words, corpus], one_input)
    atheris.Fuzz()
