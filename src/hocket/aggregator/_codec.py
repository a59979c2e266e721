"""Frames as bytes and back, and the checks of what a peer says: nothing here could run as code.

A frame is a header of 8 bytes, `magic u8, type u8, group u16, length u32` (all little-endian), and a body of `length`
bytes. Bodies of control frames have a fixed form and at most MOST_CONTROL_NBYTES; a DATA frame's body is `sequence u64,
offset u64` and at most one segment.
"""

import struct
from typing import Final

from . import _frames as wire
from ._kinds import BITWISE, FLOATS, IN_BLOCKS, REDUCING, ElementType, Kind, Operator, element_nbytes

HEADER: Final = struct.Struct("<BBHI")
DATA_HEAD: Final = struct.Struct("<BBHIQQ")
_DATA_BODY_NBYTES: Final = 16
_HELLO = struct.Struct("<8sHH8s32s")
_CHALLENGE = struct.Struct("<H32s32s")
_PROOF = struct.Struct("<32s")
_WELCOME = struct.Struct("<IIII")
_JOIN = struct.Struct("<HBBB")
_LEVEL = struct.Struct("<HHHH")
_NUMBER = struct.Struct("<Q")
_OPEN = struct.Struct("<QBBBxHxxQII")
_FAIL = struct.Struct("<QHH")
_EXACT = {
    wire.FrameType.HELLO: _HELLO.size,
    wire.FrameType.CHALLENGE: _CHALLENGE.size,
    wire.FrameType.PROOF: _PROOF.size,
    wire.FrameType.WELCOME: _WELCOME.size,
    wire.FrameType.JOINED: _NUMBER.size,
    wire.FrameType.LEAVE: 0,
    wire.FrameType.OPEN: _OPEN.size,
    wire.FrameType.CREDIT: _NUMBER.size,
    wire.FrameType.ACK: _NUMBER.size,
    wire.FrameType.DONE: _NUMBER.size,
    wire.FrameType.PING: _NUMBER.size,
    wire.FrameType.PONG: _NUMBER.size,
}


def data_head(group: int, sequence: int, offset: int, nbytes: int) -> bytes:
    """Return the header of a segment of so many bytes."""
    return DATA_HEAD.pack(wire.MAGIC, wire.FrameType.DATA, group, nbytes + _DATA_BODY_NBYTES, sequence, offset)


def encode(frame: wire.Frame) -> bytes:
    """Return a control frame as bytes (for DATA see `data_head`)."""
    group, body = 0, b""
    match frame:
        case wire.Hello():
            kind = wire.FrameType.HELLO
            body = _HELLO.pack(wire.GREETING, frame.oldest, frame.newest, frame.key, frame.nonce)
        case wire.Challenge():
            kind, body = wire.FrameType.CHALLENGE, _CHALLENGE.pack(*frame)
        case wire.Proof():
            kind, body = wire.FrameType.PROOF, _PROOF.pack(*frame)
        case wire.Welcome():
            kind, body = wire.FrameType.WELCOME, _WELCOME.pack(*frame)
        case wire.Refuse():
            kind, body = wire.FrameType.REFUSE, _text(frame.reason)
        case wire.Join():
            kind, group = wire.FrameType.JOIN, frame.group
            body = _JOIN.pack(frame.total, len(frame.levels), len(frame.name), len(frame.label))
            body += b"".join(_LEVEL.pack(*level) for level in frame.levels) + frame.name + frame.label
        case wire.Joined():
            kind, group, body = wire.FrameType.JOINED, frame.group, _NUMBER.pack(frame.generation)
        case wire.Leave():
            kind, group = wire.FrameType.LEAVE, frame.group
        case wire.Open():
            kind, group, body = wire.FrameType.OPEN, frame.group, _OPEN.pack(*frame[1:])
        case wire.Credit():
            kind, group, body = wire.FrameType.CREDIT, frame.group, _NUMBER.pack(frame.nbytes)
        case wire.Ack():
            kind, group, body = wire.FrameType.ACK, frame.group, _NUMBER.pack(frame.sequence)
        case wire.Done():
            kind, group, body = wire.FrameType.DONE, frame.group, _NUMBER.pack(frame.sequence)
        case wire.Fail():
            kind, group = wire.FrameType.FAIL, frame.group
            body = _FAIL.pack(frame.sequence, frame.code, frame.member) + _text(frame.reason)
        case wire.Ping():
            kind, body = wire.FrameType.PING, _NUMBER.pack(frame.number)
        case wire.Pong():
            kind, body = wire.FrameType.PONG, _NUMBER.pack(frame.number)
        case wire.Data():
            raise ValueError("a segment has a payload: use data_head")
    return HEADER.pack(wire.MAGIC, kind, group, len(body)) + body


def check_length(kind: wire.FrameType, nbytes: int, segment_nbytes: int) -> None:
    """Raise ProtocolError if no frame of this type has a body of so many bytes."""
    exact = _EXACT.get(kind)
    if kind == wire.FrameType.DATA:
        fits = _DATA_BODY_NBYTES < nbytes <= _DATA_BODY_NBYTES + segment_nbytes
    elif exact is not None:
        fits = nbytes == exact
    else:
        fits = nbytes <= wire.MOST_CONTROL_NBYTES
    if not fits:
        raise wire.ProtocolError(f"a {kind.name} frame of {nbytes} bytes")


def decode(kind: wire.FrameType, group: int, body: bytes) -> wire.Frame:
    """Return the control frame of a body whose length `check_length` has passed.

    Raises:
        ProtocolError: a field is out of its range.
    """
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
        case wire.FrameType.CHALLENGE:
            return wire.Challenge(*_CHALLENGE.unpack(body))
        case wire.FrameType.PROOF:
            return wire.Proof(*_PROOF.unpack(body))
        case wire.FrameType.WELCOME:
            return wire.Welcome(*_WELCOME.unpack(body))
        case wire.FrameType.REFUSE:
            return wire.Refuse(body.decode(errors="replace"))
        case wire.FrameType.JOIN:
            return _decode_join(group, body)
        case wire.FrameType.JOINED:
            return wire.Joined(group, *_NUMBER.unpack(body))
        case wire.FrameType.LEAVE:
            return wire.Leave(group)
        case wire.FrameType.OPEN:
            sequence, what, operator, element, root, nbytes, segment, deadline = _OPEN.unpack(body)
            return wire.Open(
                group, sequence, Kind(what), Operator(operator), ElementType(element), root, nbytes, segment, deadline
            )
        case wire.FrameType.CREDIT:
            return wire.Credit(group, *_NUMBER.unpack(body))
        case wire.FrameType.ACK:
            return wire.Ack(group, *_NUMBER.unpack(body))
        case wire.FrameType.DONE:
            return wire.Done(group, *_NUMBER.unpack(body))
        case wire.FrameType.FAIL:
            sequence, code, member = _FAIL.unpack_from(body)
            return wire.Fail(group, sequence, wire.FailCode(code), member, body[_FAIL.size :].decode(errors="replace"))
        case wire.FrameType.PING:
            return wire.Ping(*_NUMBER.unpack(body))
        case wire.FrameType.PONG:
            return wire.Pong(*_NUMBER.unpack(body))
        case wire.FrameType.DATA:
            raise AssertionError("a DATA frame is no control frame")


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
    if (
        not 1 <= len(join.levels) <= wire.MOST_LEVELS
        or not join.name
        or len(join.name) > wire.MOST_NAME
        or not join.total
    ):
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
    return text.encode()[: wire.MOST_CONTROL_NBYTES - 64]
