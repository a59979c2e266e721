"""Text files that say where they end, in comments, so that one that was cut off is not taken for a shorter one."""

from typing import Final

_HEAD: Final = '# The last line of this file is "# end".'
_END: Final = "# end"


def with_end(text: str) -> str:
    """Return a file's text with its end marked; who edits it by hand may drop the first line."""
    return f"{_HEAD}\n{text.rstrip()}\n{_END}\n"


def is_cut_off(text: str) -> bool:
    """Return whether a file that was written with its end marked has lost it."""
    lines = text.splitlines()
    return bool(lines) and (_END not in lines if lines[0] == _HEAD else _HEAD.startswith(text))
