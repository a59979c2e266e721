import copy
import pickle
from collections.abc import Callable

import pytest

from hocket.comm import CollectiveMismatchError, CollectiveTimeoutError, CommError, PeerDiedError


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
@pytest.mark.parametrize(
    "error",
    [
        CommError("broken"),
        PeerDiedError("rank 3 has died", rank=3),
        CollectiveTimeoutError("ranks 1 and 2 are late", missing=(1, 2)),
        CollectiveMismatchError("different sizes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_a_copy(error: CommError, again: Callable[[CommError], CommError]) -> None:
    """A broken group raises its error again for each later operation, and errors cross processes."""
    found = again(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)
