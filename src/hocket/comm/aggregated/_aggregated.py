"""Collectives through an aggregator, and through the hosts while there is none, or for what it cannot do."""

from functools import partial

import torch
from torch import Tensor

from hocket.aggregator import ElementType, Kind, Operator, fold

from ..transport import Flats, ReduceOperator, Transport
from ._agreement import Agreement, Request
from ._session import AggregationSession
from ._wire_types import raw, wire_element, wire_operator


class AggregatedTransport:
    """Says each operation in the aggregator's terms; whether it is done there is a matter of the `Agreement`.

    `hosts` works without the aggregator; coming in there the first time may take `timeout_s`. `beside` is another way
    through the hosts, on which ranks come to an agreement while `hosts` is used.
    """

    def __init__(
        self,
        session: AggregationSession,
        hosts: Transport,
        rank: int,
        size: int,
        name: str,
        timeout_s: float = 30.0,
        beside: Transport | None = None,
    ) -> None:
        self.agreement = Agreement(session, beside or hosts, size, name, timeout_s, watch=beside is not None)
        self._hosts = hosts
        self._rank = rank
        self._size = size
        self._order = session.position.order  # the rank at each position: how the aggregator counts
        self._positions = session.position.positions

    def all_reduce(self, flat: Tensor, op: ReduceOperator, timeout_s: float) -> str:
        def make() -> Request:
            return self._reduction(Kind.ALL_REDUCE, flat, op, flat, kept=True)

        fits = flat.numel() and _can_reduce(op, flat.dtype)
        return self.agreement.do(make if fits else None, lambda s: self._hosts.all_reduce(flat, op, s), timeout_s)

    def reduce(self, flat: Tensor, op: ReduceOperator, root: int, timeout_s: float) -> str:
        def make() -> Request:
            target = flat if self._rank == root else None
            return self._reduction(Kind.REDUCE, flat, op, target, root=self._positions[root])

        fits = flat.numel() and _can_reduce(op, flat.dtype)
        return self.agreement.do(make if fits else None, lambda s: self._hosts.reduce(flat, op, root, s), timeout_s)

    def broadcast(self, flat: Tensor, root: int, timeout_s: float) -> str:
        def make() -> Request:
            # Into the user's tensor at once: what was in it is nobody's input.
            send, receive = (flat, None) if self._rank == root else (None, flat)
            return Request(Kind.BROADCAST, send, receive, _nothing, root=self._positions[root])

        through_hosts = partial(self._hosts.broadcast, flat, root)
        return self.agreement.do(make if flat.numel() else None, through_hosts, timeout_s)

    def all_gather(self, outputs: Flats, flat: Tensor, timeout_s: float) -> str:
        def make() -> Request:
            result = self.agreement.result_buffer(flat.numel() * self._size, flat.dtype)
            parts = list(result.view(self._size, -1))

            def deliver() -> None:
                parts[self._positions[self._rank]].copy_(flat)  # which the aggregator does not send back
                for r, position in enumerate(self._positions):
                    outputs[r].copy_(parts[position])

            return Request(Kind.ALL_GATHER, flat, result, deliver, kept=True)

        fits = outputs[0].numel() and len({output.numel() for output in outputs}) == 1
        return self.agreement.do(make if fits else None, lambda s: self._hosts.all_gather(outputs, flat, s), timeout_s)

    def reduce_scatter(self, output: Tensor, inputs: Flats, op: ReduceOperator, timeout_s: float) -> str:
        def make() -> Request:
            send = torch.cat([inputs[r] for r in self._order])
            return self._reduction(Kind.REDUCE_SCATTER, send, op, output)

        fits = output.numel() and _can_reduce(op, output.dtype) and len({one.numel() for one in inputs}) == 1
        through_hosts = partial(self._hosts.reduce_scatter, output, inputs, op)
        return self.agreement.do(make if fits else None, through_hosts, timeout_s)

    def all_to_all(self, outputs: Flats, inputs: Flats, timeout_s: float) -> str:
        """See Transport; always through the hosts."""
        return self.agreement.do(None, lambda s: self._hosts.all_to_all(outputs, inputs, s), timeout_s)

    def gather(self, outputs: Flats | None, flat: Tensor, root: int, timeout_s: float) -> str:
        """See Transport; always through the hosts."""
        return self.agreement.do(None, lambda s: self._hosts.gather(outputs, flat, root, s), timeout_s)

    def scatter(self, flat: Tensor, inputs: Flats | None, root: int, timeout_s: float) -> str:
        """See Transport; always through the hosts."""
        return self.agreement.do(None, lambda s: self._hosts.scatter(flat, inputs, root, s), timeout_s)

    def barrier(self, timeout_s: float) -> str:
        return self.agreement.do(lambda: Request(Kind.BARRIER, None, None, _nothing), self._hosts.barrier, timeout_s)

    def locate(self, pairs: Tensor, element: ElementType, operator: Operator, timeout_s: float) -> str:
        """All-reduce pairs of a value and a location, as `hocket.comm.minloc` packs them, in place."""

        def make() -> Request:
            result = self.agreement.result_buffer(pairs.numel(), pairs.dtype)
            deliver = partial(pairs.copy_, result)
            return Request(Kind.ALL_REDUCE, pairs, result, deliver, operator, element, kept=True)

        through_hosts = partial(locate_by_gathering, self._hosts, pairs, element, operator, self._size)
        return self.agreement.do(make if pairs.numel() else None, through_hosts, timeout_s)

    def _reduction(
        self, kind: Kind, send: Tensor, op: ReduceOperator, target: Tensor | None, *, root: int = 0, kept: bool = False
    ) -> Request:
        """Return a request whose result ends in `target`; None if no result comes to this rank."""
        operator, element = wire_operator(op), wire_element(send.dtype)
        assert operator is not None
        assert element is not None
        if target is None:
            return Request(kind, send, None, _nothing, operator, element, root)
        result = self.agreement.result_buffer(target.numel(), target.dtype)
        deliver = partial(op.deliver, _seen(result, op), _seen(target, op), self._size)
        return Request(kind, send, result, deliver, operator, element, root, kept)

    def close(self, timeout_s: float) -> None:
        """Leave the aggregator; see `Agreement.close`."""
        self.agreement.close(timeout_s)


def locate_by_gathering(
    transport: Transport, pairs: Tensor, element: ElementType, operator: Operator, size: int, timeout_s: float
) -> str:
    """Return the same as `AggregatedTransport.locate` by an all_gather: every rank does what the aggregator would."""
    everyone = torch.empty(size, pairs.numel(), dtype=pairs.dtype)
    path = transport.all_gather(list(everyone), pairs, timeout_s)
    rule = fold(operator, element)
    total = rule.begin(raw(everyone[0]))
    for part in everyone[1:]:
        rule.add(total, raw(part))
    pairs.copy_(everyone[0])
    return path


def _can_reduce(op: ReduceOperator, dtype: torch.dtype) -> bool:
    return wire_operator(op) is not None and wire_element(dtype) is not None


def _seen(flat: Tensor, op: ReduceOperator) -> Tensor:
    """`flat` as the type that torch computes with."""
    return flat if op.view is None else flat.view(op.view)


def _nothing() -> None:
    """Do nothing: the result is in place already, or none comes here."""
