"""Which relaxed forms of training this process uses, for whoever must know that it is not serially equivalent."""

from hocket.planner import Synchronisation

_reasons: list[str] = []


def note(word: str) -> None:
    """Note that training by `word`, as a plan writes it, has begun."""
    reason = Synchronisation.parse(word).reason
    if reason not in _reasons:
        _reasons.append(reason)


def reasons() -> list[str]:
    """Why this process's losses are not those of one worker; empty if they should be."""
    return list(_reasons)
