"""Has what fails in one rank's step, evaluation or prediction end that of every rank: soon, and with its text."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from hocket.comm import CollectiveMismatchError, CommError, torch_adapter

from ..data import loops_set_aside
from ..mesh import Mesh, give_up, in_turn
from ..pipeline import StageError

_LEAST_ALL_S, _MOST_ALL_S = 2.0, 10.0
"""Seconds in which all ranks must have failed for groups to be left as they are: as on a batch that no rank takes.

Between these it is as long as the longest step took: on a slow machine ranks' errors come further apart, too.
"""

_ANSWER_S = 3.0
"""Seconds in which the store must answer."""

_made = itertools.count()


class StepErrors:
    """Tells the others of an error that this rank's step ends in, and raises theirs.

    A rank that fails alone leaves the others in operations that it will not come to: it leaves its groups, and the
    others wait no longer. If every rank has failed by itself, nobody waits, and the groups can be used on.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._steps, self._longest_s = mesh, 0, 0.0
        self.inside = False  # whether such a block is open
        self._number = next(_made)  # ranks make their trainers in the same order

    @contextmanager
    def told(self, what: str = "step") -> Iterator[None]:
        """Open a block for one step, or for something else that all ranks do together.

        Raises:
            StageError: One rank of a pipeline has failed; on every rank.
            CommError: Another rank has failed, where there is no pipeline.
        """
        self._steps += 1
        self.inside, begin_s = True, time.monotonic()
        try:
            if self._mesh.whole.size > 1:
                in_turn(f"{'an' if what == 'evaluation' else 'a'} {what} of the Trainer")
            with loops_set_aside():
                yield
        except CollectiveMismatchError:
            raise
        except Exception as error:
            whole = self._mesh.whole
            if whole.group is None or not hasattr(whole.group, "fail"):
                raise
            try:
                all_s = min(_MOST_ALL_S, max(_LEAST_ALL_S, self._longest_s, time.monotonic() - begin_s))
                said = torch_adapter.ask(partial(self._said, error, what, all_s), all_s + _ANSWER_S)
            except (RuntimeError, TimeoutError):  # the store has gone with its host, or stands still
                raise error from None
            if not said:
                raise
            groups = {id(one.group): one.group for one in self._mesh.worlds if one.group is not None}.values()
            give_up(groups, said, f"{whole.group.group_name}/{self._number}/{self._steps}")
            staged = self._mesh["pipeline"].size > 1
            if not staged and not isinstance(error, CommError):
                raise
            raise (StageError if staged else CommError)(said) from error
        finally:
            self.inside = False
            self._longest_s = max(self._longest_s, time.monotonic() - begin_s)

    def _said(self, error: Exception, what: str, all_s: float) -> str:
        """Return which rank has failed, and how; "" if all have by themselves, or if none is known to have.

        Whether all have, the first to know says for all: one that waited in vain has left its groups, and a rank whose
        error comes after that leaves them, too.
        """
        whole = self._mesh.whole
        store = torch_adapter.PrefixStore(
            f"hocket/step/{whole.group.group_name}/{self._number}/{self._steps}/", torch_adapter.default_store()
        )
        keys = [str(rank) for rank in range(whole.size)]
        if not isinstance(error, CommError):
            store.set(keys[whole.rank], f"{type(error).__name__}: {error}")
            try:
                store.wait(keys, timedelta(seconds=all_s))
                found = b"all"
            except RuntimeError:
                found = b"some"
            if store.compare_set("found", "", found.decode()) == b"all":
                return ""
        first = next((key for key in keys if store.check([key])), None)
        return "" if first is None else f"rank {first} has failed in its {what}: {store.get(first).decode()}"
