"""The wire protocol of aggregation: frames on a TCP connection, and nothing that could run as code.

A frame is a header of 8 bytes, `magic u8, type u8, group u16, length u32` (all little-endian), and a body of `length`
bytes. Bodies of control frames have a fixed form and at most MOST_CONTROL_NBYTES; a DATA frame's body is `sequence u64,
offset u64` and at most one segment. docs/aggregator.md tells the conversation; this file is its grammar.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

MAGIC: Final = 0xA6
GREETING: Final = b"hocketAG"
OLDEST_VERSION: Final = 1
NEWEST_VERSION: Final = 1
NONCE_NBYTES: Final = 32
PROOF_NBYTES: Final = 32
KEY_NBYTES: Final = 8
MOST_CONTROL_NBYTES: Final = 1024
MOST_SEGMENT_NBYTES: Final = 1 << 20
SEGMENT_GRAIN: Final = 16
"""Segments begin at multiples of this many bytes, so that no element of any type is cut."""
MOST_LEVELS: Final = 8
MOST_NAME: Final = 128
NOBODY: Final = 0xFFFF


class ProtocolError(Exception):
    """The peer broke the protocol; the connection must end."""


class FrameType(IntEnum):
    """The second byte of a frame."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSE = 5
    JOIN = 6
    JOINED = 7
    LEAVE = 8
    OPEN = 9
    DATA = 10
    CREDIT = 11
    ACK = 12
    DONE = 13
    FAIL = 14
    PING = 15
    PONG = 16


class Kind(IntEnum):
    """What an operation does."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE = 2
    BROADCAST = 3
    REDUCE_SCATTER = 4
    ALL_GATHER = 5


REDUCING: Final = frozenset({Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER})
COPYING: Final = frozenset({Kind.BROADCAST, Kind.ALL_GATHER})
COMMITTED: Final = frozenset({Kind.REDUCE, Kind.BROADCAST, Kind.REDUCE_SCATTER})
"""Kinds after which not every member holds the whole result: these are over for nobody before all have their part."""
IN_BLOCKS: Final = frozenset({Kind.REDUCE_SCATTER, Kind.ALL_GATHER})


class Operator(IntEnum):
    """How contributions are combined. NONE for operations that only copy."""

    NONE = 0
    SUM = 1
    MIN = 2
    MAX = 3
    MINLOC = 4
    MAXLOC = 5
    BAND = 6
    BOR = 7
    BXOR = 8
    LAND = 9
    LOR = 10
    LXOR = 11


class ElementType(IntEnum):
    """The type of an element, or of the value of a pair of value and location (MINLOC and MAXLOC)."""

    INT8 = 1
    UINT8 = 2
    INT16 = 3
    UINT16 = 4
    INT32 = 5
    UINT32 = 6
    INT64 = 7
    UINT64 = 8
    FLOAT16 = 9
    BFLOAT16 = 10
    FLOAT32 = 11
    FLOAT64 = 12


FLOATS: Final = frozenset({ElementType.FLOAT16, ElementType.BFLOAT16, ElementType.FLOAT32, ElementType.FLOAT64})
LOCATING: Final = frozenset({Operator.MINLOC, Operator.MAXLOC})
BITWISE: Final = frozenset({Operator.BAND, Operator.BOR, Operator.BXOR})
PAIR_NBYTES: Final = 16
"""A pair: its value in the first bytes, filled up to 8, and its location as int64."""

_WIDTHS = {
    ElementType.INT8: 1,
    ElementType.UINT8: 1,
    ElementType.INT16: 2,
    ElementType.UINT16: 2,
    ElementType.FLOAT16: 2,
    ElementType.BFLOAT16: 2,
    ElementType.INT32: 4,
    ElementType.UINT32: 4,
    ElementType.FLOAT32: 4,
    ElementType.INT64: 8,
    ElementType.UINT64: 8,
    ElementType.FLOAT64: 8,
}


class FailCode(IntEnum):
    """Why a group has ended."""

    MEMBER_LOST = 1
    MISMATCH = 2
    TIMEOUT = 3
    PARENT_LOST = 4
    QUOTA = 5
    MEMBER_STALLED = 6
    CLOSING = 7
    PROTOCOL = 8


def element_nbytes(operator: Operator, element: ElementType) -> int:
    """Bytes of one element on the wire."""
    return PAIR_NBYTES if operator in LOCATING else _WIDTHS[element]


class Hello(NamedTuple):
    """Client: the versions that it speaks, which token it holds (see `key_of`), and a random number."""

    oldest: int
    newest: int
    key: bytes
    nonce: bytes


class Challenge(NamedTuple):
    """Server: the version chosen, its own random number, and the proof that it holds the token."""

    version: int
    nonce: bytes
    proof: bytes


class Proof(NamedTuple):
    """Client: the proof that it holds the token."""

    proof: bytes


class Welcome(NamedTuple):
    """Server: bytes of the longest segment; bytes in flight per group; operations at once per group; groups."""

    segment_nbytes: int
    window_nbytes: int
    operations: int
    groups: int


class Refuse(NamedTuple):
    """Server: the reason for which it ends the connection."""

    reason: str


class Level(NamedTuple):
    """A place in the tree of a group.

    Attributes:
        size: children of the aggregator of this level.
        child: which of them leads to the sender; sums are in the order of these.
        first: the lowest position in the group of the members below that child.
        members: how many are below it; their positions follow each other.
    """

    size: int
    child: int
    first: int
    members: int


class Join(NamedTuple):
    """Client: takes part in a group of `total` members; the levels lead from here to the root of the tree."""

    group: int
    total: int
    levels: tuple[Level, ...]
    name: bytes
    label: bytes


class Joined(NamedTuple):
    """Server: all members have come; a number that only this incarnation of the group has."""

    group: int
    generation: int


class Leave(NamedTuple):
    """Client: takes part no more."""

    group: int


class Open(NamedTuple):
    """Client: begins an operation.

    Attributes:
        sequence: 1 for the first of a group, and so on.
        root: a position in the group.
        nbytes: of the whole vector: all blocks of a reduce_scatter or an all_gather.
        segment_nbytes: the vector, or each block, travels in pieces of this size.
        deadline_ms: after so long the operation fails for all.
    """

    group: int
    sequence: int
    kind: Kind
    operator: Operator
    element: ElementType
    root: int
    nbytes: int
    segment_nbytes: int
    deadline_ms: int


class Data(NamedTuple):
    """Either: a segment; the payload lies where the receiver wanted it."""

    group: int
    sequence: int
    offset: int
    nbytes: int


class Credit(NamedTuple):
    """Server: so many more bytes may be sent for this group."""

    group: int
    nbytes: int


class Ack(NamedTuple):
    """Client: has its part of the result."""

    group: int
    sequence: int


class Done(NamedTuple):
    """Server: all have."""

    group: int
    sequence: int


class Fail(NamedTuple):
    """Server, or an aggregator to its parent: the group is over; by the member at this position, or NOBODY."""

    group: int
    sequence: int
    code: FailCode
    member: int
    reason: str


class Ping(NamedTuple):
    """Either: asks for a sign of life."""

    number: int


class Pong(NamedTuple):
    """Either: gives it."""

    number: int


Frame = (
    Hello
    | Challenge
    | Proof
    | Welcome
    | Refuse
    | Join
    | Joined
    | Leave
    | Open
    | Data
    | Credit
    | Ack
    | Done
    | Fail
    | Ping
    | Pong
)

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

CLIENT_FRAMES: Final = frozenset(
    {
        FrameType.JOIN,
        FrameType.LEAVE,
        FrameType.OPEN,
        FrameType.DATA,
        FrameType.ACK,
        FrameType.FAIL,
        FrameType.PING,
        FrameType.PONG,
    }
)
"""What an aggregator takes from a client that it knows."""
SERVER_FRAMES: Final = frozenset(
    {
        FrameType.REFUSE,
        FrameType.JOINED,
        FrameType.DATA,
        FrameType.CREDIT,
        FrameType.DONE,
        FrameType.FAIL,
        FrameType.PING,
        FrameType.PONG,
    }
)
"""What a client takes from an aggregator that it knows."""


def data_head(group: int, sequence: int, offset: int, nbytes: int) -> bytes:
    """What stands before a segment of so many bytes."""
    return DATA_HEAD.pack(MAGIC, FrameType.DATA, group, nbytes + _DATA_BODY_NBYTES, sequence, offset)


def encode(frame: Frame) -> bytes:
    """A control frame as bytes (for DATA see `data_head`)."""
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
    """Raises ProtocolError if no frame of this type has a body of so many bytes."""
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
    """The control frame of a body whose length `check_length` has passed.

    Raises:
        ProtocolError: a field is out of its range.
    """
    if group and kind not in _OF_GROUP:
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
    """Raises ProtocolError if a JOIN frame makes no sense by itself."""
    if not 1 <= len(join.levels) <= MOST_LEVELS or not join.name or len(join.name) > MOST_NAME or not join.total:
        raise ProtocolError(f"a JOIN frame with {len(join.levels)} levels and a name of {len(join.name)} bytes")
    first, count = join.levels[0].first, 1
    for level in join.levels:
        inside = level.first <= first and first + count <= level.first + level.members <= join.total
        if not inside or level.child >= level.size:
            raise ProtocolError(f"a JOIN frame with {level} in a group of {join.total}")
        first, count = level.first, level.members


def check_open(frame: Open, total: int, segment_nbytes: int) -> None:
    """Raises ProtocolError if an OPEN frame makes no sense in a group of `total` members."""
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
_OF_GROUP = frozenset(
    {
        FrameType.JOIN,
        FrameType.JOINED,
        FrameType.LEAVE,
        FrameType.OPEN,
        FrameType.CREDIT,
        FrameType.ACK,
        FrameType.DONE,
        FrameType.FAIL,
    }
)
