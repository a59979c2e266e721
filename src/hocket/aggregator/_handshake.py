"""How the two sides of a connection prove to each other that they hold the job's token, without showing it.

Each side sends a random number; each proves itself by HMAC-SHA256 with the token as key over its role, the version and
both numbers (a challenge and response as in RFC 5802, without the passwords that RFC derives keys from).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path
from typing import Final

from ._frames import KEY_NBYTES

LEAST_TOKEN_NBYTES: Final = 16


class TokenError(ValueError):
    """A token file that cannot be used; the message says what to do."""


def key_of(token: bytes) -> bytes:
    """A name for a token by which the aggregator finds it among those that it knows."""
    return hashlib.sha256(b"hocket aggregation key" + token).digest()[:KEY_NBYTES]


def prove(token: bytes, role: bytes, version: int, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """The proof of one side; `role` is b"client" or b"server"."""
    message = b"hocket aggregation " + role + version.to_bytes(2, "little") + client_nonce + server_nonce
    return hmac.new(token, message, hashlib.sha256).digest()


def same(proof: bytes, other: bytes) -> bool:
    """Compares two proofs in a time that tells nothing."""
    return hmac.compare_digest(proof, other)


def read_tokens(path: str | os.PathLike[str]) -> tuple[bytes, ...]:
    """The tokens of a file, one a line; jobs with different tokens do not see each other's groups.

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
