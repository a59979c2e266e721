"""What its operator gives an aggregator: the address, the file of tokens, quotas and deadlines."""

import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ._frames import MOST_SEGMENT_NBYTES

LEAST_TOKEN_NBYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Quotas and deadlines of an aggregator.

    Attributes:
        connections: Clients at once; of them a quarter may be strangers that have not proved themselves yet. The next
            takes the place of the stranger that has been silent the longest.
        groups: Groups of one token at once.
        members: Members of one group at this aggregator.
        operations: Operations under way at once in one group.
        nbytes: Bytes of all windows together: the memory that clients can make the aggregator hold.
        window_nbytes: Bytes that one member may have under way in one group.
        segment_nbytes: Bytes of the longest segment.
        hello_s: Seconds for a client to prove itself.
        join_s: Seconds from the first member of a group to the last.
        stall_s: Seconds after which a peer that takes nothing of what waits for it is dropped, or a parent that does
            not answer; an aggregator below has twice as long to answer.
    """

    connections: int = 1024
    groups: int = 256
    members: int = 1024
    operations: int = 64
    nbytes: int = 1 << 30
    window_nbytes: int = 1 << 20
    segment_nbytes: int = MOST_SEGMENT_NBYTES
    hello_s: float = 5.0
    join_s: float = 60.0
    stall_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("connections", "groups", "members", "operations", "nbytes", "window_nbytes", "segment_nbytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")
        for name in ("hello_s", "join_s", "stall_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give seconds above 0")
        if not 16 <= self.segment_nbytes <= MOST_SEGMENT_NBYTES or self.segment_nbytes > self.window_nbytes:
            raise ValueError(
                f"segment_nbytes is {self.segment_nbytes}; give 16 to {MOST_SEGMENT_NBYTES}, and no more than "
                f"window_nbytes, {self.window_nbytes}"
            )
        if self.window_nbytes >= 1 << 32:
            raise ValueError(f"window_nbytes is {self.window_nbytes}; give less than 4 GiB")


class AddressError(ValueError):
    """A text that names no address; the message says what to write."""


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port of `HOST:PORT` or `[IPV6]:PORT`; the host may be left out, and is then 0.0.0.0.

    Raises:
        AddressError: it is not of that form, or the host does not resolve.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or not int(port) < 65536:
        raise AddressError(f"{text!r} is no address; write HOST:PORT, for example 10.0.0.7:7070")
    host = host.strip("[]") or "0.0.0.0"
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"the host of {text!r} does not resolve ({error.strerror}); give its address") from None
    address = found[0][4]
    return str(address[0]), int(address[1])


class TokenError(ValueError):
    """A token file that cannot be used; the message says what to do."""


def read_tokens(path: str | os.PathLike[str]) -> tuple[bytes, ...]:
    """Return the tokens of a file, one a line; jobs with different tokens do not see each other's groups.

    Raises:
        TokenError: no file, others may read it, or a token that is too short.
    """
    try:
        text = Path(path).read_bytes()
        mode = os.stat(path).st_mode
    except OSError as error:
        raise TokenError(f"the token file {str(path)!r} cannot be read: {error.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise TokenError(f"the token file {str(path)!r} is open to others (mode {mode & 0o777:o}); chmod it to 600")
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not tokens:
        raise TokenError(f"the token file {str(path)!r} holds no token; write {LEAST_TOKEN_NBYTES} or more characters")
    for number, token in enumerate(tokens, 1):
        if len(token) < LEAST_TOKEN_NBYTES:
            raise TokenError(
                f"token {number} of {str(path)!r} has {len(token)} characters; {LEAST_TOKEN_NBYTES} is the least"
            )
    return tokens
