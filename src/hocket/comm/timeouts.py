"""What HOCKET_TIMEOUT says, for ranks and for their launcher, which does without torch."""

import os
from collections.abc import Mapping


def timeout_setting(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds of HOCKET_TIMEOUT; None where it is not set. Raises ValueError: it is no number above 0."""
    text = environment.get("HOCKET_TIMEOUT")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"HOCKET_TIMEOUT={text}: give the seconds that an operation may take, a number above 0")
    return seconds
