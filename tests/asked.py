"""Which cases a run asks for: a file whose tests share one costly run of all their cases need run no others."""

from typing import Any

import pytest


def asked(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """Return the values of parameters with which tests of the fixture's file are run, each once, in order.

    Tests without all of these parameters do not count. `make test` leaves most cases of a test to the long tests.
    """
    given = (
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function) and hasattr(item, "callspec")
    )
    return list(dict.fromkeys(tuple(one[name] for name in names) for one in given if {*names} <= one.keys()))
