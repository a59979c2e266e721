"""A job's tokens: files that nobody else may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

LEAST_TOKEN_NBYTES: Final = 16


class TokenError(ValueError):
    """A token file that cannot be used; the message says what to do."""


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
