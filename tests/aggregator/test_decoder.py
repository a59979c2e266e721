"""The decoder: what was encoded comes out however it was cut; anything else ends the connection and nothing more."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.aggregator import ElementType, FailCode, Kind, Level, Operator
from hocket.aggregator import _codec as codec
from hocket.aggregator import _frames as wire
from hocket.aggregator._decoder import Decoder

SEGMENT = 1 << 12
ALL = frozenset(wire.FrameType)
number = st.integers(0, 2**64 - 1)
group = st.integers(0, 2**16 - 1)
short = st.integers(0, 2**16 - 1)
word = st.integers(0, 2**32 - 1)
text = st.text(max_size=60)


@st.composite
def joins(draw):
    total = draw(st.integers(1, 500))
    first, count, levels = draw(st.integers(0, total - 1)), 1, []
    for _ in range(draw(st.integers(1, wire.MOST_LEVELS))):
        size = draw(st.integers(1, 9))
        levels.append(Level(size, draw(st.integers(0, size - 1)), first, count))
        wider = draw(st.integers(0, first))
        count = draw(st.integers(first + count - wider, total - wider))
        first = wider
    return wire.Join(
        draw(group), total, tuple(levels), draw(st.binary(min_size=1, max_size=128)), draw(st.binary(max_size=255))
    )


control = st.one_of(
    st.builds(wire.Hello, short, short, st.binary(min_size=8, max_size=8), st.binary(min_size=32, max_size=32)),
    st.builds(wire.Challenge, short, st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32)),
    st.builds(wire.Proof, st.binary(min_size=32, max_size=32)),
    st.builds(wire.Welcome, word, word, word, word),
    st.builds(wire.Refuse, text),
    joins(),
    st.builds(wire.Joined, group, number),
    st.builds(wire.Leave, group),
    st.builds(
        wire.Open,
        group,
        number,
        st.sampled_from(Kind),
        st.sampled_from(Operator),
        st.sampled_from(ElementType),
        short,
        number,
        word,
        word,
    ),
    st.builds(wire.Credit, group, number),
    st.builds(wire.Ack, group, number),
    st.builds(wire.Done, group, number),
    st.builds(wire.Fail, group, number, st.sampled_from(FailCode), short, text),
    st.builds(wire.Ping, number),
    st.builds(wire.Pong, number),
)
data = st.tuples(group, number, number, st.binary(min_size=1, max_size=SEGMENT))


def feed(decoder, stream, cuts, place):
    """Gives `stream` in pieces and returns the frames."""
    frames, at = [], 0
    sizes = iter(cuts)
    while at < len(stream):
        room = decoder.buffers()
        assert sum(map(len, room)) > 0
        size = min(next(sizes, 1 << 30) or 1, len(stream) - at, sum(map(len, room)))
        piece, left = memoryview(stream)[at : at + size], size
        for buffer in room:
            here = min(left, len(buffer))
            buffer[:here] = piece[size - left : size - left + here]
            left -= here
        decoder.filled(size)
        at += size
        frames.extend(decoder.frames(place))
    return frames


class Payloads:
    def __init__(self):
        self.all = []

    def __call__(self, frame):
        self.all.append(bytearray(frame.nbytes))
        return memoryview(self.all[-1])


@settings(deadline=None, max_examples=150)
@given(st.lists(st.one_of(control, data), max_size=12), st.lists(st.integers(1, 3000), max_size=60))
def test_what_was_encoded_comes_out_however_the_stream_is_cut(frames, cuts):
    stream, want, payloads = b"", [], []
    for frame in frames:
        if isinstance(frame, wire.Frame):
            stream += codec.encode(frame)
            want.append(frame)
        else:
            handle, sequence, offset, payload = frame
            stream += codec.data_head(handle, sequence, offset, len(payload)) + payload
            want.append(wire.Data(handle, sequence, offset, len(payload)))
            payloads.append(payload)
    seen = Payloads()
    got = feed(Decoder(ALL, SEGMENT), stream, cuts, seen)
    assert got == want
    assert [bytes(payload) for payload in seen.all] == payloads


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=400), st.lists(st.integers(1, 50), max_size=20))
def test_noise_raises_only_protocol_errors(noise, cuts):
    for prefix in (b"", bytes([wire.MAGIC])):
        try:
            feed(Decoder(ALL, SEGMENT), prefix + noise, cuts, Payloads())
        except wire.ProtocolError:
            continue


@settings(deadline=None, max_examples=300)
@given(
    control,
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 400),
)
def test_damaged_frames_are_read_or_refused(frame, damage, length):
    raw = bytearray(codec.encode(frame))
    for at, value in damage:
        raw[at % len(raw)] = value
    struct.pack_into("<I", raw, 4, max(0, len(raw) - 8))  # a wrong length is another test
    seen = Payloads()
    try:
        feed(Decoder(ALL, SEGMENT), bytes(raw[: len(raw) - length % 7] if length else raw), [], seen)
    except wire.ProtocolError:
        return
    assert sum(map(len, seen.all)) <= len(raw) + SEGMENT


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(list(wire.FrameType)), group, word)
def test_no_header_makes_the_decoder_hold_more_than_a_segment(kind, handle, length):
    seen = Payloads()
    header = codec.HEADER.pack(wire.MAGIC, kind, handle, length) + bytes(16)
    try:
        feed(Decoder(ALL, SEGMENT), header, [], seen)
    except wire.ProtocolError:
        return
    assert sum(map(len, seen.all)) <= SEGMENT
    assert length <= max(wire.MOST_CONTROL_NBYTES, SEGMENT + 16)


def test_a_frame_that_may_not_come_now_is_refused():
    decoder = Decoder(frozenset({wire.FrameType.HELLO}), SEGMENT)
    with pytest.raises(wire.ProtocolError, match="LEAVE frame, which may not come now"):
        feed(decoder, codec.encode(wire.Leave(1)), [], Payloads())


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (wire.Join(1, 4, (Level(4, 4, 0, 1),), b"g", b""), "Level"),
        (wire.Join(1, 4, (), b"g", b""), "0 levels"),
        (wire.Join(1, 4, (Level(4, 0, 0, 1),), b"", b""), "name of 0 bytes"),
        (wire.Join(1, 4, (Level(2, 0, 2, 1), Level(2, 0, 0, 2)), b"g", b""), "Level"),
        (wire.Join(1, 2, (Level(4, 0, 2, 1),), b"g", b""), "Level"),
    ],
)
def test_a_join_that_makes_no_sense_is_refused(frame, text):
    with pytest.raises(wire.ProtocolError, match=text):
        feed(Decoder(ALL, SEGMENT), codec.encode(frame), [], Payloads())


GOOD = wire.Open(1, 1, Kind.ALL_REDUCE, Operator.SUM, ElementType.FLOAT32, 0, 64, 64, 1000)


@pytest.mark.parametrize(
    "change",
    [
        {"root": 4},
        {"operator": Operator.NONE},
        {"kind": Kind.BROADCAST},
        {"operator": Operator.BAND},
        {"nbytes": 0},
        {"nbytes": 66},
        {"nbytes": 1 << 50},
        {"kind": Kind.REDUCE_SCATTER, "nbytes": 24},
        {"operator": Operator.MINLOC, "nbytes": 24},
        {"segment_nbytes": 0},
        {"segment_nbytes": 24},
        {"segment_nbytes": 2 * SEGMENT},
        {"deadline_ms": 0},
    ],
)
def test_an_operation_that_makes_no_sense_is_refused(change):
    codec.check_open(GOOD, 4, SEGMENT)
    with pytest.raises(wire.ProtocolError):
        codec.check_open(GOOD._replace(**change), 4, SEGMENT)
