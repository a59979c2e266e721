"""Where the user's program is: the line that called into this package, however deep below it runs; standard library."""

import os
import sys
import warnings
from types import FrameType
from typing import Final

_BELOW: Final = (__name__.partition(".")[0], "torch", "keras")  # what runs between a program's line and one of ours


def program_frame() -> FrameType | None:
    """Return the innermost frame outside of this package, torch and Keras; None where there is none."""
    homes = tuple(
        f"{os.path.dirname(file)}{os.sep}"
        for name in _BELOW
        if (file := getattr(sys.modules.get(name), "__file__", None)) is not None
    )
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*homes, "<frozen ")):
        frame = frame.f_back
    return frame


def program_line() -> str:
    """Return the program's line as "file:line"."""
    frame = program_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "in the model"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn as `warnings.warn`, with the program's line: the one to look at, also where torch called us meanwhile."""
    frame = program_frame()
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    names = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        names.get("__name__") or "<unknown>",
        names.setdefault("__warningregistry__", {}),
    )
