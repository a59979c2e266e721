"""What aggregation needs of torch and of the environment: types, settings, and a connection that comes back."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.distributed import ReduceOp

from hocket.aggregator import (
    AddressError,
    AggregationClient,
    AggregationError,
    AggregatorLostError,
    ElementType,
    Operator,
    TokenError,
    parse_address,
    read_tokens,
)

from ._errors import CommError
from ._reduce import Reducer
from ._seat import Seat
from ._shards import Shards

log = logging.getLogger("hocket.comm")

ADDRESS_VARIABLE: Final = "HOCKET_AGGREGATOR"
TOKEN_VARIABLE: Final = "HOCKET_AGGREGATOR_TOKEN_FILE"
STALL_VARIABLE: Final = "HOCKET_AGGREGATOR_STALL_S"

_RETRY_S: Final = 0.5
_MOST_RETRY_S: Final = 5.0
_JOIN_S: Final = 10.0

_OPERATORS = {
    ReduceOp.SUM: Operator.SUM,
    ReduceOp.MIN: Operator.MIN,
    ReduceOp.MAX: Operator.MAX,
    ReduceOp.BAND: Operator.BAND,
    ReduceOp.BOR: Operator.BOR,
    ReduceOp.BXOR: Operator.BXOR,
}
_ELEMENTS = {
    torch.int8: ElementType.INT8,
    torch.uint8: ElementType.UINT8,
    torch.int16: ElementType.INT16,
    torch.uint16: ElementType.UINT16,
    torch.int32: ElementType.INT32,
    torch.uint32: ElementType.UINT32,
    torch.int64: ElementType.INT64,
    torch.uint64: ElementType.UINT64,
    torch.float16: ElementType.FLOAT16,
    torch.bfloat16: ElementType.BFLOAT16,
    torch.float32: ElementType.FLOAT32,
    torch.float64: ElementType.FLOAT64,
}


def wire_operator(op: Reducer) -> Operator | None:
    """The aggregator's operator for what `op` does between ranks; None if it has none."""
    return _OPERATORS.get(op.engine_operator)


def wire_element(dtype: torch.dtype) -> ElementType | None:
    """The aggregator's type; None if it has none."""
    return _ELEMENTS.get(dtype)


def raw(flat: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory of a flat tensor as bytes."""
    if flat.stride(0) != 1:  # one element: any stride is contiguous, but not every one can be seen as bytes
        flat = flat.as_strided(flat.shape, (1,))
    array: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
    return array


@dataclass(frozen=True, slots=True)
class AggregationSettings:
    """Where this process's aggregator is.

    Attributes:
        addresses: host and port; several aggregators share long messages.
        token: the job's.
        stall_s: seconds of silence after which it counts as lost.
    """

    addresses: tuple[tuple[str, int], ...]
    token: bytes
    stall_s: float = 5.0

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.addresses)

    @classmethod
    def from_environment(cls) -> AggregationSettings | None:
        """What HOCKET_AGGREGATOR, HOCKET_AGGREGATOR_TOKEN_FILE and HOCKET_AGGREGATOR_STALL_S say; None without them.

        Raises:
            CommError: a variable that cannot be used.
        """
        address = os.environ.get(ADDRESS_VARIABLE)
        if not address:
            return None
        token_file = os.environ.get(TOKEN_VARIABLE)
        if not token_file:
            raise CommError(
                f"{ADDRESS_VARIABLE} is set to {address!r} but {TOKEN_VARIABLE} is not; set both or neither"
            )
        try:
            stall_s = float(os.environ.get(STALL_VARIABLE, "5"))
            if not stall_s > 0:
                raise ValueError(f"{STALL_VARIABLE} is {stall_s}; give seconds above 0")
            return cls(tuple(map(parse_address, address.split(","))), read_tokens(token_file)[0], stall_s)
        except (AddressError, TokenError, ValueError) as error:
            raise CommError(f"the aggregator of {ADDRESS_VARIABLE} cannot be used: {error}") from None


class Session:
    """A rank's place in one group at the aggregator: lost and found again.

    While it is lost, a thread of its own keeps trying to come back; `ready` says when it has.

    Args:
        settings: where the aggregator is.
        name: of the group, the same on all its ranks and on no others.
        seat: this rank's place among the others.
        label: how errors call this rank.
    """

    def __init__(self, settings: AggregationSettings, name: str, seat: Seat, label: str) -> None:
        self.seat = seat
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
        """The group.

        Raises:
            AggregatorLostError: it is lost.
        """
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
        """Tries to come in within `timeout_s`; if that fails, goes on trying beside."""
        try:
            self._come_in(min(timeout_s, _JOIN_S))
        except AggregationError as error:
            log.warning("%s goes on without the aggregator until it can be reached: %s", self._label, error)
            self._try_again()

    def lose(self) -> None:
        """Gives up this incarnation, which tells the other members, and begins to try again."""
        self._forget()
        self._try_again()

    def close(self) -> None:
        """Leaves for good."""
        self._closing.set()
        self._wanted.set()
        self._forget()

    def _forget(self) -> None:
        with self._lock:
            shards, self._shards = self._shards, None
        if shards is not None:
            shards.close()

    def _come_in(self, timeout_s: float) -> None:
        settings, seat = self._settings, self.seat
        clients: list[AggregationClient] = []
        try:
            for address in settings.addresses:
                client = AggregationClient(
                    address, settings.token, timeout_s=min(timeout_s, settings.stall_s), stall_s=settings.stall_s
                )
                clients.append(client)
            groups = [
                client.join(self._name, len(seat.order), seat.position, levels=seat.levels, label=self._label)
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


def label_of(global_rank: int) -> str:
    """How the aggregator's errors call a rank."""
    return f"rank {global_rank} ({socket.gethostname()})"
