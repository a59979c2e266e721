"""A rank's connection to the aggregator that comes back after it was lost."""

import contextlib
import logging
import threading
from typing import Final

from hocket.aggregator import AggregationClient, AggregationError, AggregatorLostError

from ._aggregation_settings import AggregationSettings
from ._shards import Shards
from ._tree_position import TreePosition

log = logging.getLogger("hocket.comm")

_RETRY_S: Final = 0.5
_MOST_RETRY_S: Final = 5.0
_JOIN_S: Final = 10.0


class AggregationSession:
    """A rank's place in one group at the aggregator: lost and found again.

    While it is lost, a thread of its own keeps trying to come back; `ready` says when it has. All ranks of the group,
    and no others, give the same `name`; `label` is how errors call this rank.
    """

    def __init__(self, settings: AggregationSettings, name: str, position: TreePosition, label: str) -> None:
        self.position = position
        self._settings = settings
        self._name = name
        self._label = label
        self._lock = threading.Lock()
        self._shards: Shards | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._wanted = threading.Event()

    @property
    def group(self) -> Shards:
        """The group. Raises AggregatorLostError: it is lost."""
        shards = self._shards
        if shards is None:
            raise AggregatorLostError("this rank has lost its place at the aggregator")
        return shards

    @property
    def ready(self) -> int:
        """The number of this incarnation of the group, the same on all ranks that are in it; 0 while it is lost."""
        shards = self._shards
        if shards is None:
            return 0
        with contextlib.suppress(AggregationError):
            shards.look()
            if shards.generation:
                return shards.generation
        self.lose()
        return 0

    def begin(self, timeout_s: float) -> None:
        """Try to come in within `timeout_s`; if that fails, go on trying beside."""
        try:
            self._come_in(min(timeout_s, _JOIN_S))
        except AggregationError as error:
            log.warning("%s goes on without the aggregator until it can be reached: %s", self._label, error)
            self._try_again()

    def lose(self) -> None:
        """Give up this incarnation, which tells the other members, and begin to try again."""
        self._forget()
        self._try_again()

    def close(self) -> None:
        """Leave for good."""
        self._closing.set()
        self._wanted.set()
        self._forget()

    def _forget(self) -> None:
        with self._lock:
            shards, self._shards = self._shards, None
        if shards is not None:
            shards.close()

    def _come_in(self, timeout_s: float) -> None:
        settings, here = self._settings, self.position
        clients: list[AggregationClient] = []
        try:
            for address in settings.addresses:
                client = AggregationClient(
                    address, settings.token, timeout_s=min(timeout_s, settings.stall_s), stall_s=settings.stall_s
                )
                clients.append(client)
            groups = [
                client.join(self._name, len(here.order), here.position, levels=here.levels, label=self._label)
                for client in clients
            ]
            for group in groups:
                group.wait(timeout_s)
        except AggregationError:
            for client in clients:
                client.close()
            raise
        with self._lock:
            self._shards = Shards(clients, groups)
        if self._closing.is_set():
            self.close()

    def _try_again(self) -> None:
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_trying, name=f"hocket-{self._name}", daemon=True)
            self._thread.start()

    def _keep_trying(self) -> None:
        pause_s = _RETRY_S
        while not self._closing.is_set():
            self._wanted.wait()
            self._closing.wait(pause_s)
            if self._closing.is_set():
                return
            with contextlib.suppress(AggregationError):
                self._come_in(_JOIN_S)
                self._wanted.clear()
                pause_s = _RETRY_S
                continue
            pause_s = min(2 * pause_s, _MOST_RETRY_S)
