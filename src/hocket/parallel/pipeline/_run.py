"""Carries out a rank's actions of one step: forwards, backwards and the messages between them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hocket.schedule.pipeline import COMPUTES, PipelineAction

from . import _values
from ._flight import Flight, TakenGradient
from ._micro import Micro
from ._stage import Stage
from ._wire import Key, StageWire

Tensor = torch.Tensor


class StageFailure(NamedTuple):
    """What ended a forward pass in a stage. It goes on in the place of values, so that all ranks hear of it."""

    stage: int  # number of the stage
    said: str  # the error's type and message


class StageSpan(NamedTuple):
    """When this rank computed."""

    action: PipelineAction  # what
    begin_s: float  # on `time.perf_counter`
    end_s: float  # likewise


def idle_shares(spans: Sequence[Sequence[StageSpan]]) -> list[float]:
    """Return the share of a step, from the first rank's begin to the last one's end, that each rank did not compute.

    `spans` are `Pipeline.spans` of every rank, on one host, whose clock they share.
    """
    begin_s = min(span.begin_s for rank in spans for span in rank)
    end_s = max(span.end_s for rank in spans for span in rank)
    return [1 - sum(span.end_s - span.begin_s for span in rank) / (end_s - begin_s) for rank in spans]


class Run:
    """One step of one rank.

    Args:
        stages: this rank's, by index.
        runners: what runs each of them, by index.
        homes: of every stage the rank that holds it.
        wire: to the other ranks.
        micros: the micro-batches.
        device: where tensors are received.
        loss_of: loss of a micro-batch, weighed with its share; None in an evaluation without loss.
        final: called with each stage when the gradients of its parameters are complete.
        last_backward: called with each stage before its last backward.
        hands_on: whether an error of a stage's forward is handed on to the last stage, as its output, and not raised.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        runners: dict[int, Callable[..., Any]],
        homes: Sequence[int],
        wire: StageWire,
        micros: Sequence[Micro],
        device: torch.device,
        loss_of: Callable[[Any, Micro], Tensor] | None,
        final: Callable[[Stage], None],
        last_backward: Callable[[Stage], None],
        *,
        hands_on: bool = False,
    ) -> None:
        self._stages = stages
        self._runners = runners
        self._homes = homes
        self._wire = wire
        self._micros = micros
        self._device = device
        self._loss_of = loss_of
        self._final = final
        self._last_backward = last_backward
        self._hands_on = hands_on
        self._flights: dict[tuple[int, int], Flight] = {}
        self._taken: dict[tuple[int, int], tuple[Sequence[Any], list[Any]]] = {}  # values, and what to wait for
        self._gradients: dict[tuple[int, int], Callable[[], list[Tensor | None]]] = {}  # which wait until they are here
        self._to_send: dict[tuple[int, int], Any] = {}
        self._left = dict.fromkeys(stages, len(micros))
        self.losses: list[Tensor] = []
        self.outputs: dict[int, Any] = {}
        self.spans: list[StageSpan] = []

    def perform(self, actions: Sequence[PipelineAction]) -> None:
        """Carry out `actions` in order and wait until all that was sent is on its way."""
        self._halved = {(a.stage, a.micro_batch) for a in actions if a.kind == "I"}
        doing = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_of_inputs,
            "W": self._backward_of_weights,
            "SEND_F": self._send_forward,
            "RECV_F": self._receive_forward,
            "SEND_B": self._send_backward,
            "RECV_B": self._receive_backward,
        }
        for compute, group in itertools.groupby(actions, lambda action: action.kind in COMPUTES):
            for action in group if compute else self._receives_first(list(group)):
                doing[action.kind](action)
        self._wire.drain()
        self._wire.settle()

    def _receives_first(self, messages: list[PipelineAction]) -> list[PipelineAction]:
        """Return the messages between two computations, receives before sends where none needs a description.

        Between hosts a sender is told that its receiver is ready on the connection that bears the messages: behind a
        large one it would be told late.
        """
        receives = [action for action in messages if action.kind.startswith("RECV")]
        if not all(action.kind == "RECV_B" or self._is_known(action) for action in receives):
            return messages
        return receives + [action for action in messages if action not in receives]

    def _is_known(self, action: PipelineAction) -> bool:
        return self._wire.knows(self._homes[action.stage - 1], self._key(action.stage, action.micro_batch))

    # --- computing ----------------------------------------------------------------------------------------------------

    def _forward(self, action: PipelineAction) -> None:
        stage, micro = self._stages[action.stage], self._micros[action.micro_batch]
        place = (action.stage, action.micro_batch)
        taken, works = self._taken.pop(place, ([], []))
        self._wire.wait(works)
        begin_s = time.perf_counter()
        if isinstance(taken, StageFailure):
            self._pass_on(stage, action, taken)
            return
        flight = Flight(stage, taken)
        run = self._runners[action.stage]
        stage.module.training = stage.model.training
        try:
            output = flight.forward(run, micro.inputs, split_backward=place in self._halved)
            if stage.last and self._loss_of is not None:
                flight.loss = self._loss_of(output, micro)
                self.losses.append(flight.loss.detach())
        except Exception as error:
            if not self._hands_on:
                raise
            output = StageFailure(stage.index, f"{type(error).__name__}: {error}")
        if torch.is_grad_enabled():
            self._flights[place] = flight
        self.spans.append(StageSpan(action, begin_s, time.perf_counter()))
        self._pass_on(stage, action, output)

    def _pass_on(self, stage: Stage, action: PipelineAction, output: Any) -> None:
        if stage.last:
            if self._loss_of is None or isinstance(output, StageFailure):
                self.outputs[action.micro_batch] = output
        elif stage.index + 1 in self._stages:
            self._taken[action.stage + 1, action.micro_batch] = (_values.leaves(output), [])
        else:
            self._to_send[action.stage, action.micro_batch] = output

    def _backward(self, action: PipelineAction) -> None:
        flight = self._begin_backward(action)
        self._about_to_end(action)
        begin_s = time.perf_counter()
        found = flight.backward()
        self._spent(action, begin_s)
        self._hand_back(action, found)
        del self._flights[action.stage, action.micro_batch]
        self._ended(action)

    def _backward_of_inputs(self, action: PipelineAction) -> None:
        flight = self._begin_backward(action)
        begin_s = time.perf_counter()
        found = flight.backward_of_inputs()
        self._spent(action, begin_s)
        self._hand_back(action, found)

    def _backward_of_weights(self, action: PipelineAction) -> None:
        flight = self._flights.pop((action.stage, action.micro_batch))
        self._about_to_end(action)
        begin_s = time.perf_counter()
        flight.backward_of_weights()
        self._spent(action, begin_s)
        self._ended(action)

    def _begin_backward(self, action: PipelineAction) -> Flight:
        flight = self._flights[action.stage, action.micro_batch]
        if self._stages[action.stage].last:
            flight.start_from_loss()
        else:
            flight.arrived(self._gradients.pop((action.stage, action.micro_batch))())
        return flight

    def _hand_back(self, action: PipelineAction, found: list[TakenGradient]) -> None:
        if action.stage - 1 in self._stages:
            known = [one.value for one in found]
            self._gradients[action.stage - 1, action.micro_batch] = lambda: known
        elif action.stage:
            self._to_send[action.stage, action.micro_batch] = found

    def _spent(self, action: PipelineAction, begin_s: float) -> None:
        self.spans.append(StageSpan(action, begin_s, time.perf_counter()))

    def _about_to_end(self, action: PipelineAction) -> None:
        if self._left[action.stage] == 1:
            self._last_backward(self._stages[action.stage])

    def _ended(self, action: PipelineAction) -> None:
        self._left[action.stage] -= 1
        if not self._left[action.stage]:
            self._final(self._stages[action.stage])

    # --- messages -----------------------------------------------------------------------------------------------------

    def _key(self, stage: int, micro: int) -> Key:
        training = next(iter(self._stages.values())).model.training
        return (stage, training, torch.is_grad_enabled(), self._micros[micro].key)

    def _send_forward(self, action: PipelineAction) -> None:
        values = self._to_send.pop((action.stage, action.micro_batch))
        after = action.stage + 1
        self._wire.send_values(self._homes[after], self._key(after, action.micro_batch), values)

    def _receive_forward(self, action: PipelineAction) -> None:
        peer, key = self._homes[action.stage - 1], self._key(action.stage, action.micro_batch)
        self._taken[action.stage, action.micro_batch] = self._wire.receive_values(peer, key, self._device)

    def _send_backward(self, action: PipelineAction) -> None:
        found = self._to_send.pop((action.stage, action.micro_batch))
        key = self._key(action.stage, action.micro_batch)
        tensors, there = [one.tensor for one in found], [one.there for one in found]
        self._wire.send_gradients(self._homes[action.stage - 1], key, tensors, there)

    def _receive_backward(self, action: PipelineAction) -> None:
        flight = self._flights[action.stage, action.micro_batch]
        buffers = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in flight.expects()]
        peer, key = self._homes[action.stage + 1], self._key(action.stage + 1, action.micro_batch)
        self._gradients[action.stage, action.micro_batch] = self._wire.receive_gradients(peer, key, buffers)
