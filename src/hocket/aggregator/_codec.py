"""Frames as bytes and back, and the checks of what a peer says: nothing here could run as code.

A frame is a header of 8 bytes, `magic u8, type u8, group u16, length u32` (all little-endian), and a body of `length`
bytes. Bodies of control frames have a fixed form and at most MOST_CONTROL_NBYTES; a DATA frame's body is `sequence u64,
offset u64` and at most one segment.
"""

import struct
from typing import Final

from ._frames import (
    GREETING,
    MAGIC,
    MOST_CONTROL_NBYTES,
    MOST_LEVELS,
    MOST_NAME,
    OF_GROUP,
    SEGMENT_GRAIN,
    Ack,
    Challenge,
    Credit,
    Data,
    Done,
    Fail,
    FailCode,
    Frame,
    FrameType,
    Hello,
    Join,
    Joined,
    Leave,
    Level,
    Open,
    Ping,
    Pong,
    Proof,
    ProtocolError,
    Refuse,
    Welcome,
)
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
    FrameType.HELLO: _HELLO.size,
    FrameType.CHALLENGE: _CHALLENGE.size,
    FrameType.PROOF: _PROOF.size,
    FrameType.WELCOME: _WELCOME.size,
    FrameType.JOINED: _NUMBER.size,
    FrameType.LEAVE: 0,
    FrameType.OPEN: _OPEN.size,
    FrameType.CREDIT: _NUMBER.size,
    FrameType.ACK: _NUMBER.size,
    FrameType.DONE: _NUMBER.size,
    FrameType.PING: _NUMBER.size,
    FrameType.PONG: _NUMBER.size,
}


def data_head(group: int, sequence: int, offset: int, nbytes: int) -> bytes:
    """Return the header of a segment of so many bytes."""
    return DATA_HEAD.pack(MAGIC, FrameType.DATA, group, nbytes + _DATA_BODY_NBYTES, sequence, offset)


def encode(frame: Frame) -> bytes:
    """Return a control frame as bytes (for DATA see `data_head`)."""
    group, body = 0, b""
    match frame:
        case Hello():
            kind = FrameType.HELLO
            body = _HELLO.pack(GREETING, frame.oldest, frame.newest, frame.key, frame.nonce)
        case Challenge():
            kind, body = FrameType.CHALLENGE, _CHALLENGE.pack(*frame)
        case Proof():
            kind, body = FrameType.PROOF, _PROOF.pack(*frame)
        case Welcome():
            kind, body = FrameType.WELCOME, _WELCOME.pack(*frame)
        case Refuse():
            kind, body = FrameType.REFUSE, _text(frame.reason)
        case Join():
            kind, group = FrameType.JOIN, frame.group
            body = _JOIN.pack(frame.total, len(frame.levels), len(frame.name), len(frame.label))
            body += b"".join(_LEVEL.pack(*level) for level in frame.levels) + frame.name + frame.label
        case Joined():
            kind, group, body = FrameType.JOINED, frame.group, _NUMBER.pack(frame.generation)
        case Leave():
            kind, group = FrameType.LEAVE, frame.group
        case Open():
            kind, group, body = FrameType.OPEN, frame.group, _OPEN.pack(*frame[1:])
        case Credit():
            kind, group, body = FrameType.CREDIT, frame.group, _NUMBER.pack(frame.nbytes)
        case Ack():
            kind, group, body = FrameType.ACK, frame.group, _NUMBER.pack(frame.sequence)
        case Done():
            kind, group, body = FrameType.DONE, frame.group, _NUMBER.pack(frame.sequence)
        case Fail():
            kind, group = FrameType.FAIL, frame.group
            body = _FAIL.pack(frame.sequence, frame.code, frame.member) + _text(frame.reason)
        case Ping():
            kind, body = FrameType.PING, _NUMBER.pack(frame.number)
        case Pong():
            kind, body = FrameType.PONG, _NUMBER.pack(frame.number)
        case Data():
            raise ValueError("a segment has a payload: use data_head")
    return HEADER.pack(MAGIC, kind, group, len(body)) + body


def check_length(kind: FrameType, nbytes: int, segment_nbytes: int) -> None:
    """Raise ProtocolError if no frame of this type has a body of so many bytes."""
    exact = _EXACT.get(kind)
    if kind == FrameType.DATA:
        fits = _DATA_BODY_NBYTES < nbytes <= _DATA_BODY_NBYTES + segment_nbytes
    elif exact is not None:
        fits = nbytes == exact
    else:
        fits = nbytes <= MOST_CONTROL_NBYTES
    if not fits:
        raise ProtocolError(f"a {kind.name} frame of {nbytes} bytes")


def decode(kind: FrameType, group: int, body: bytes) -> Frame:
    """Return the control frame of a body whose length `check_length` has passed.

    Raises:
        ProtocolError: a field is out of its range.
    """
    if group and kind not in OF_GROUP:
        raise ProtocolError(f"a {kind.name} frame for group {group}")
    try:
        return _decode(kind, group, body)
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"a {kind.name} frame that cannot be read: {error}") from None


def _decode(kind: FrameType, group: int, body: bytes) -> Frame:
    match kind:
        case FrameType.HELLO:
            greeting, *rest = _HELLO.unpack(body)
            if greeting != GREETING:
                raise ProtocolError(f"the greeting {greeting!r}")
            return Hello(*rest)
        case FrameType.CHALLENGE:
            return Challenge(*_CHALLENGE.unpack(body))
        case FrameType.PROOF:
            return Proof(*_PROOF.unpack(body))
        case FrameType.WELCOME:
            return Welcome(*_WELCOME.unpack(body))
        case FrameType.REFUSE:
            return Refuse(body.decode(errors="replace"))
        case FrameType.JOIN:
            return _decode_join(group, body)
        case FrameType.JOINED:
            return Joined(group, *_NUMBER.unpack(body))
        case FrameType.LEAVE:
            return Leave(group)
        case FrameType.OPEN:
            sequence, what, operator, element, root, nbytes, segment, deadline = _OPEN.unpack(body)
            return Open(
                group, sequence, Kind(what), Operator(operator), ElementType(element), root, nbytes, segment, deadline
            )
        case FrameType.CREDIT:
            return Credit(group, *_NUMBER.unpack(body))
        case FrameType.ACK:
            return Ack(group, *_NUMBER.unpack(body))
        case FrameType.DONE:
            return Done(group, *_NUMBER.unpack(body))
        case FrameType.FAIL:
            sequence, code, member = _FAIL.unpack_from(body)
            return Fail(group, sequence, FailCode(code), member, body[_FAIL.size :].decode(errors="replace"))
        case FrameType.PING:
            return Ping(*_NUMBER.unpack(body))
        case FrameType.PONG:
            return Pong(*_NUMBER.unpack(body))
        case FrameType.DATA:
            raise AssertionError("a DATA frame is no control frame")


def _decode_join(group: int, body: bytes) -> Join:
    total, depth, name_nbytes, label_nbytes = _JOIN.unpack_from(body)
    begin = _JOIN.size + depth * _LEVEL.size
    if len(body) != begin + name_nbytes + label_nbytes:
        raise ProtocolError(f"a JOIN frame of {len(body)} bytes that promises {begin + name_nbytes + label_nbytes}")
    levels = tuple(Level(*_LEVEL.unpack_from(body, _JOIN.size + i * _LEVEL.size)) for i in range(depth))
    join = Join(group, total, levels, body[begin : begin + name_nbytes], body[begin + name_nbytes :])
    check_join(join)
    return join


def check_join(join: Join) -> None:
    """Raise ProtocolError if a JOIN frame makes no sense by itself."""
    if not 1 <= len(join.levels) <= MOST_LEVELS or not join.name or len(join.name) > MOST_NAME or not join.total:
        raise ProtocolError(f"a JOIN frame with {len(join.levels)} levels and a name of {len(join.name)} bytes")
    first, count = join.levels[0].first, 1
    for level in join.levels:
        inside = level.first <= first and first + count <= level.first + level.members <= join.total
        if not inside or level.child >= level.size:
            raise ProtocolError(f"a JOIN frame with {level} in a group of {join.total}")
        first, count = level.first, level.members


def check_open(frame: Open, total: int, segment_nbytes: int) -> None:
    """Raise ProtocolError if an OPEN frame makes no sense in a group of `total` members."""
    width = element_nbytes(frame.operator, frame.element)
    blocks = total if frame.kind in IN_BLOCKS else 1
    if frame.root >= total:
        raise ProtocolError(f"root {frame.root} in a group of {total}")
    if (frame.operator == Operator.NONE) == (frame.kind in REDUCING):
        raise ProtocolError(f"a {frame.kind.name} with operator {frame.operator.name}")
    if frame.operator in BITWISE and frame.element in FLOATS:
        raise ProtocolError(f"{frame.operator.name} of {frame.element.name}")
    if (frame.nbytes == 0) != (frame.kind == Kind.BARRIER) or frame.nbytes % (width * blocks) or frame.nbytes >> 48:
        raise ProtocolError(f"a {frame.kind.name} of {frame.nbytes} bytes by {total} members")
    segment = frame.segment_nbytes
    if not SEGMENT_GRAIN <= segment <= segment_nbytes or segment % SEGMENT_GRAIN:
        raise ProtocolError(f"segments of {segment} bytes; at most {segment_nbytes} are allowed")
    if not frame.deadline_ms:
        raise ProtocolError("an operation without a deadline")


def _text(text: str) -> bytes:
    return text.encode()[: MOST_CONTROL_NBYTES - 64]
