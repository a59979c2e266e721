"""How verbs speak: errors of the user's on stderr with exit code 2, results as JSON on stdout."""

import json
import sys
from typing import Any, NoReturn

BAD_INPUT = 2


def bad_input(verb: str, message: object) -> NoReturn:
    """End with one clear error.

    Args:
        verb: The verb that was asked for.
        message: Where, which value, and what to do.
    """
    print(f"hocket {verb}: {message}\n`hocket {verb} --help` shows how it is used.", file=sys.stderr)
    raise SystemExit(BAD_INPUT)


def print_json(value: Any) -> None:
    """Print a value as one JSON document."""
    print(json.dumps(value, indent=2))
