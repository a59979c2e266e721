"""What several files of tests share."""

import pytest

from .. import asked as _asked


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> set[str]:
    """The names of the cases that tests of this file are run with."""
    return {name for (name,) in _asked.asked(request, "name")}
