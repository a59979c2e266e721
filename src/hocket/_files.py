"""Files that others read while they are written, and what JSON can say."""

import contextlib
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader, or who comes after a kill, finds all of the old one or of the new one.

    What UTF-8 cannot say, as in names of files, which are any bytes, is replaced.

    Raises:
        OSError: the file cannot be written; the old one is as it was, and nothing lies beside it.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8", errors="replace")
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_asked(path: Path, text: str) -> None:
    """Write a file that a user named: whole, except where it is a device, a pipe or where no other can be made.

    Raises:
        OSError: as `write_whole`.
    """
    if path.exists() and not (path.is_file() and os.access(path.resolve().parent, os.W_OK)):
        path.write_text(text, encoding="utf-8", errors="replace")
    else:
        write_whole(path.resolve(), text)


def json_value(value: Any) -> Any:
    """Return the value with None for the numbers that JSON has not: infinity and NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: json_value(one) for key, one in value.items()}
    return [json_value(one) for one in value] if isinstance(value, list | tuple) else value
