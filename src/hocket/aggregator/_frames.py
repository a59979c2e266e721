"""The words of the wire protocol: which frames there are, what each says, and who may send it.

docs/aggregator.md tells the conversation; `_codec.py` says how these look as bytes.
"""

from enum import IntEnum
from typing import Final, NamedTuple

from ._kinds import ElementType, Kind, Operator

MAGIC: Final = 0xA6
GREETING: Final = b"hocketAG"
OLDEST_VERSION: Final = 1
NEWEST_VERSION: Final = 1
NONCE_NBYTES: Final = 32
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


class FailCode(IntEnum):
    """Why a group has ended."""

    MEMBER_LOST = 1
    MISMATCH = 2
    TIMEOUT = 3
    PARENT_LOST = 4
    QUOTA = 5
    CLOSING = 7
    PROTOCOL = 8


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
        size: Number of children of the aggregator of this level.
        child: Number of the child that leads to the sender; sums are in the order of these.
        first: Lowest position in the group of the members below that child.
        members: Number of members below it; their positions follow each other.
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
    """Client: begins an operation."""

    group: int
    sequence: int  # 1 for the first of a group, and so on
    kind: Kind
    operator: Operator
    element: ElementType
    root: int  # position of the root in the group
    nbytes: int  # bytes of the whole vector: all blocks of a reduce_scatter or an all_gather
    segment_nbytes: int  # size of the pieces in which the vector, or each block, travels
    deadline_ms: int  # milliseconds after which the operation fails for all


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


_OfConnection = Hello | Challenge | Proof | Welcome | Refuse | Ping | Pong
Frame = _OfConnection | Join | Joined | Leave | Open | Data | Credit | Ack | Done | Fail

_T = FrameType
CLIENT_FRAMES: Final = frozenset({_T.JOIN, _T.LEAVE, _T.OPEN, _T.DATA, _T.ACK, _T.FAIL, _T.PING, _T.PONG})
"""What an aggregator takes from a client that it knows."""
SERVER_FRAMES: Final = frozenset({_T.REFUSE, _T.JOINED, _T.DATA, _T.CREDIT, _T.DONE, _T.FAIL, _T.PING, _T.PONG})
"""What a client takes from an aggregator that it knows."""
OF_GROUP: Final = frozenset({_T.JOIN, _T.JOINED, _T.LEAVE, _T.OPEN, _T.CREDIT, _T.ACK, _T.DONE, _T.FAIL})
"""Control frames that speak of a group, and name it first; the others are of the connection."""
