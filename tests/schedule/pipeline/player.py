"""A second, naive reading of what a pipeline's order means: ranks take turns at random, messages are in queues."""

from __future__ import annotations

import random
from collections import deque

from hocket.schedule.pipeline import PipelineAction, PipelineOrder

Key = tuple[int, int]


class Wrong(Exception):
    """A rank has not what it needs, takes what is meant for another action, or does something twice."""


class Player:
    """Carries an order out with nothing but sets and queues."""

    def __init__(self, order: PipelineOrder, seed: int = 0) -> None:
        self.order, self.random = order, random.Random(seed)
        self.last = order.stages - 1
        self.written = any("_" in action.kind for rank in order.ranks for action in rank)
        self.outputs: set[Key] = set()  # forwards that are done
        self.gradients: set[Key] = set()  # of the inputs
        self.weights: set[Key] = set()  # of the weights
        self.received: set[tuple[str, int, int]] = set()
        self.sent: set[tuple[str, int, int]] = set()
        self.queues: dict[tuple[int, int], deque[tuple[str, int, int]]] = {}
        # A rank holds what it does, and all hold as many.
        held = [{action.stage for action in rank} for rank in order.ranks]
        self.uneven = any(len(stages) * order.world != order.stages for stages in held)
        self.homes = {stage: rank for rank, stages in enumerate(held) for stage in stages}

    def ends_well(self) -> bool:
        """Whether all is done, each forward and each gradient once, and nothing is left on its way."""
        if self.uneven or len(self.homes) < self.order.stages:
            return False
        left = [list(rank) for rank in self.order.ranks]
        try:
            while any(left):
                able = [rank for rank, actions in enumerate(left) if actions and self.possible(rank, actions[0])]
                if not able:
                    return False
                rank = self.random.choice(able)
                self.do(rank, left[rank].pop(0))
        except Wrong:
            return False
        every = {(stage, m) for stage in range(self.order.stages) for m in range(self.order.micro_batches)}
        return self.outputs == self.gradients == self.weights == every and not any(self.queues.values())

    def queue(self, source: int, destination: int) -> deque[tuple[str, int, int]]:
        if source == destination:
            raise Wrong
        return self.queues.setdefault((source, destination), deque())

    def possible(self, rank: int, action: PipelineAction) -> bool:
        """Whether the rank has what it needs, or else waits."""
        stage, kind, m = action
        homes = self.homes
        if kind == "F":
            direct = not self.written or homes.get(stage - 1) == rank
            before = (stage - 1, m) in self.outputs if direct else ("F", stage, m) in self.received
            return stage == 0 or before
        if kind in ("B", "I"):
            direct = not self.written or homes.get(stage + 1) == rank
            behind = (stage + 1, m) in self.gradients if direct else ("B", stage, m) in self.received
            return (stage, m) in self.outputs and (stage == self.last or behind)
        if kind == "W":
            return (stage, m) in self.gradients
        if kind == "SEND_F":
            return (stage, m) in self.outputs
        if kind == "SEND_B":
            return (stage, m) in self.gradients
        if kind == "RECV_F":
            return stage > 0 and bool(self.queue(homes[stage - 1], rank))
        return stage < self.last and (stage, m) in self.outputs and bool(self.queue(homes[stage + 1], rank))

    def do(self, rank: int, action: PipelineAction) -> None:
        stage, kind, m = action
        if kind == "F":
            self.once(self.outputs, (stage, m))
        if kind in ("B", "I"):
            self.once(self.gradients, (stage, m))
        if kind in ("B", "W"):
            self.once(self.weights, (stage, m))
        if kind.startswith("SEND"):
            way = kind[-1]
            to = stage + (1 if way == "F" else -1)
            if not 0 <= to <= self.last or (way, stage, m) in self.sent:
                raise Wrong
            self.sent.add((way, stage, m))
            self.queue(rank, self.homes[to]).append((way, to, m))
        if kind.startswith("RECV"):
            way = kind[-1]
            found = self.queue(self.homes[stage + (-1 if way == "F" else 1)], rank).popleft()
            if found != (way, stage, m):
                raise Wrong
            self.received.add(found)

    def once(self, done: set[Key], key: Key) -> None:
        if key in done:
            raise Wrong
        done.add(key)
