"""How the two sides of a connection prove to each other that they hold the job's token, without showing it.

Each side sends a random number; each proves itself by HMAC-SHA256 with the token as key over its role, the version and
both numbers (a challenge and response as in RFC 5802, without the passwords that RFC derives keys from).
"""

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING

from . import _frames as wire

if TYPE_CHECKING:
    from ._link import FrameLink


def key_of(token: bytes) -> bytes:
    """Return the key of a token, by which the aggregator finds it among those that it knows."""
    return hashlib.sha256(b"hocket aggregation key" + token).digest()[: wire.KEY_NBYTES]


def prove(token: bytes, role: bytes, version: int, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the proof of one side; `role` is b"client" or b"server"."""
    message = b"hocket aggregation " + role + version.to_bytes(2, "little") + client_nonce + server_nonce
    return hmac.new(token, message, hashlib.sha256).digest()


def same(proof: bytes, other: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(proof, other)


class Applicant:
    """The side that connects, a client or a leaf aggregator: it proves itself only to whom has proved itself first."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._nonce = secrets.token_bytes(wire.NONCE_NBYTES)

    def greet(self, link: "FrameLink") -> None:
        """Begin the handshake; the answer is a Challenge, or a Refuse."""
        link.send(wire.Hello(wire.OLDEST_VERSION, wire.NEWEST_VERSION, key_of(self._token), self._nonce))

    def answer(self, challenge: wire.Challenge, link: "FrameLink") -> None:
        """Prove itself in turn; the answer is a Welcome, or a Refuse.

        Raises:
            ProtocolError: the other side speaks another version, or does not hold the token.
        """
        version, theirs = challenge.version, challenge.nonce
        if not wire.OLDEST_VERSION <= version <= wire.NEWEST_VERSION:
            raise wire.ProtocolError(f"it chose version {version} of the protocol")
        if not same(challenge.proof, prove(self._token, b"server", version, self._nonce, theirs)):
            raise wire.ProtocolError("it does not hold the token")
        link.send(wire.Proof(prove(self._token, b"client", version, self._nonce, theirs)))
        link.decoder.expected = frozenset({wire.FrameType.WELCOME, wire.FrameType.REFUSE})
