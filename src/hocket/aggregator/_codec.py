"""Frames as bytes and back, and the checks of what a peer says: nothing here could run as code.

A frame is a header of 8 bytes, `magic u8, type u8, group u16, length u32` (all little-endian), and a body of `length`
bytes. Bodies of control frames have a fixed form and at most MOST_CONTROL_NBYTES; a DATA frame's body is `sequence u64,
offset u64` and at most one segment.
"""

import struct
from collections.abc import Callable
from typing import Final

from . import _frames as wire
from ._kinds import BITWISE, FLOATS, IN_BLOCKS, REDUCING, ElementType, Kind, Operator, element_nbytes

HEADER: Final = struct.Struct("<BBHI")
DATA_HEAD: Final = struct.Struct("<BBHIQQ")
_DATA_BODY_NBYTES: Final = 16
_HELLO = struct.Struct("<8sHH8s32s")
_JOIN = struct.Struct("<HBBB")
_LEVEL = struct.Struct("<HHHH")
_OPEN = struct.Struct("<QBBBxHxxQII")
_FAIL = struct.Struct("<QHH")
# The frames that are their fields, one after the other, behind the group where they speak of one.
_PLAIN: Final[dict[wire.FrameType, tuple[Callable[..., wire.Frame], struct.Struct]]] = {
    wire.FrameType.CHALLENGE: (wire.Challenge, struct.Struct("<H32s32s")),
    wire.FrameType.PROOF: (wire.Proof, struct.Struct("<32s")),
    wire.FrameType.WELCOME: (wire.Welcome, struct.Struct("<IIII")),
    wire.FrameType.JOINED: (wire.Joined, struct.Struct("<Q")),
    wire.FrameType.LEAVE: (wire.Leave, struct.Struct("<")),
    wire.FrameType.OPEN: (wire.Open, _OPEN),
    wire.FrameType.CREDIT: (wire.Credit, struct.Struct("<Q")),
    wire.FrameType.ACK: (wire.Ack, struct.Struct("<Q")),
    wire.FrameType.DONE: (wire.Done, struct.Struct("<Q")),
    wire.FrameType.PING: (wire.Ping, struct.Struct("<Q")),
    wire.FrameType.PONG: (wire.Pong, struct.Struct("<Q")),
}
_KINDS: Final = {form: kind for kind, (form, _) in _PLAIN.items()}


def data_head(group: int, sequence: int, offset: int, nbytes: int) -> bytes:
    """Return the header of a segment of so many bytes."""
    return DATA_HEAD.pack(wire.MAGIC, wire.FrameType.DATA, group, nbytes + _DATA_BODY_NBYTES, sequence, offset)


def encode(frame: wire.Frame) -> bytes:
    """Return a control frame as bytes (for DATA see `data_head`)."""
    match frame:
        case wire.Hello():
            kind, body = wire.FrameType.HELLO, _HELLO.pack(wire.GREETING, *frame)
        case wire.Refuse():
            kind, body = wire.FrameType.REFUSE, _text(frame.reason)
        case wire.Join():
            kind, body = wire.FrameType.JOIN, _JOIN.pack(frame.total, *map(len, frame[2:]))
            body += b"".join(_LEVEL.pack(*level) for level in frame.levels) + frame.name + frame.label
        case wire.Fail():
            kind = wire.FrameType.FAIL
            body = _FAIL.pack(frame.sequence, frame.code, frame.member) + _text(frame.reason)
        case wire.Data():
            raise ValueError("a segment has a payload: use data_head")
        case _:
            kind = _KINDS[type(frame)]
            body = _PLAIN[kind][1].pack(*frame[kind in wire.OF_GROUP :])
    group = frame[0] if kind in wire.OF_GROUP else 0
    return HEADER.pack(wire.MAGIC, kind, group, len(body)) + body


def check_length(kind: wire.FrameType, nbytes: int, segment_nbytes: int) -> None:
    """Raise ProtocolError if no frame of this type has a body of so many bytes."""
    if kind == wire.FrameType.DATA:
        fits = _DATA_BODY_NBYTES < nbytes <= _DATA_BODY_NBYTES + segment_nbytes
    elif kind == wire.FrameType.HELLO:
        fits = nbytes == _HELLO.size
    elif kind in _PLAIN:
        fits = nbytes == _PLAIN[kind][1].size
    else:
        fits = nbytes <= wire.MOST_CONTROL_NBYTES
    if not fits:
        raise wire.ProtocolError(f"a {kind.name} frame of {nbytes} bytes")


def decode(kind: wire.FrameType, group: int, body: bytes) -> wire.Frame:
    """Return the frame of a body that `check_length` has passed. Raises ProtocolError: a field is out of its range."""
    if group and kind not in wire.OF_GROUP:
        raise wire.ProtocolError(f"a {kind.name} frame for group {group}")
    try:
        return _decode(kind, group, body)
    except (struct.error, ValueError) as error:
        raise wire.ProtocolError(f"a {kind.name} frame that cannot be read: {error}") from None


def _decode(kind: wire.FrameType, group: int, body: bytes) -> wire.Frame:
    match kind:
        case wire.FrameType.HELLO:
            greeting, *rest = _HELLO.unpack(body)
            if greeting != wire.GREETING:
                raise wire.ProtocolError(f"the greeting {greeting!r}")
            return wire.Hello(*rest)
        case wire.FrameType.REFUSE:
            return wire.Refuse(body.decode(errors="replace"))
        case wire.FrameType.JOIN:
            return _decode_join(group, body)
        case wire.FrameType.OPEN:
            sequence, what, operator, element, *rest = _OPEN.unpack(body)
            return wire.Open(group, sequence, Kind(what), Operator(operator), ElementType(element), *rest)
        case wire.FrameType.FAIL:
            sequence, code, member = _FAIL.unpack_from(body)
            return wire.Fail(group, sequence, wire.FailCode(code), member, body[_FAIL.size :].decode(errors="replace"))
        case wire.FrameType.DATA:
            raise AssertionError("a DATA frame is no control frame")
    form, fields = _PLAIN[kind]
    return form(*[group] * (kind in wire.OF_GROUP), *fields.unpack(body))


def _decode_join(group: int, body: bytes) -> wire.Join:
    total, depth, name_nbytes, label_nbytes = _JOIN.unpack_from(body)
    begin = _JOIN.size + depth * _LEVEL.size
    if len(body) != begin + name_nbytes + label_nbytes:
        raise wire.ProtocolError(
            f"a JOIN frame of {len(body)} bytes that promises {begin + name_nbytes + label_nbytes}"
        )
    levels = tuple(wire.Level(*_LEVEL.unpack_from(body, _JOIN.size + i * _LEVEL.size)) for i in range(depth))
    join = wire.Join(group, total, levels, body[begin : begin + name_nbytes], body[begin + name_nbytes :])
    check_join(join)
    return join


def check_join(join: wire.Join) -> None:
    """Raise ProtocolError if a JOIN frame makes no sense by itself."""
    if not (1 <= len(join.levels) <= wire.MOST_LEVELS and 0 < len(join.name) <= wire.MOST_NAME and join.total):
        raise wire.ProtocolError(f"a JOIN frame with {len(join.levels)} levels and a name of {len(join.name)} bytes")
    first, count = join.levels[0].first, 1
    for level in join.levels:
        inside = level.first <= first and first + count <= level.first + level.members <= join.total
        if not inside or level.child >= level.size:
            raise wire.ProtocolError(f"a JOIN frame with {level} in a group of {join.total}")
        first, count = level.first, level.members


def check_open(frame: wire.Open, total: int, segment_nbytes: int) -> None:
    """Raise ProtocolError if an OPEN frame makes no sense in a group of `total` members."""
    width = element_nbytes(frame.operator, frame.element)
    blocks = total if frame.kind in IN_BLOCKS else 1
    if frame.root >= total:
        raise wire.ProtocolError(f"root {frame.root} in a group of {total}")
    if (frame.operator == Operator.NONE) == (frame.kind in REDUCING):
        raise wire.ProtocolError(f"a {frame.kind.name} with operator {frame.operator.name}")
    if frame.operator in BITWISE and frame.element in FLOATS:
        raise wire.ProtocolError(f"{frame.operator.name} of {frame.element.name}")
    if (frame.nbytes == 0) != (frame.kind == Kind.BARRIER) or frame.nbytes % (width * blocks) or frame.nbytes >> 48:
        raise wire.ProtocolError(f"a {frame.kind.name} of {frame.nbytes} bytes by {total} members")
    segment = frame.segment_nbytes
    if not wire.SEGMENT_GRAIN <= segment <= segment_nbytes or segment % wire.SEGMENT_GRAIN:
        raise wire.ProtocolError(f"segments of {segment} bytes; at most {segment_nbytes} are allowed")
    if not frame.deadline_ms:
        raise wire.ProtocolError("an operation without a deadline")


def _text(text: str) -> bytes:
    return text.encode(errors="replace")[: wire.MOST_CONTROL_NBYTES - 64]
