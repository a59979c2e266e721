"""Whose operations a trainer's log holds: those of its own steps, however many trainers a process has."""

from __future__ import annotations

import gc

import torch

import hocket
from hocket.comm.transport import observers as _observe
from hocket.testing import run_ranks
from hocket.timeline import Timeline


def in_turns(turns: int) -> tuple[list[Timeline], list[int], int]:
    """Two trainers take turns; their timelines, how many listened after each step, and how many when both had gone."""

    def made(layers: int) -> hocket.Trainer:
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
        return hocket.Trainer(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))

    batch = (torch.ones(4, 8), torch.ones(4, 8))
    trainers = [made(1), made(2)]
    listening = [len(_observe.observers)]
    for _ in range(turns):
        for trainer in trainers:
            trainer.step(batch)
            listening.append(len(_observe.observers))
    timelines = [trainer.timeline() for trainer in trainers]
    del trainers, trainer
    gc.collect()  # trainers are held by the hooks that they hold
    return timelines, listening, len(_observe.observers)


def test_operations_belong_to_the_trainer_that_steps_and_trainers_at_rest_do_not_listen() -> None:
    turns = 5
    for timelines, listening, left in run_ranks(in_turns, 2, turns):
        assert listening == [0] + [1] * (2 * turns)
        assert left == 0
        counted = turns - 2  # but those that warm up
        each = [[span for span in timeline.of(0, "collective") if span.nbytes] for timeline in timelines]
        assert [len(spans) % counted for spans in each] == [0, 0]
        for layers, spans in zip((1, 2), each, strict=True):
            gradients = 4 * (8 * 8 + 8) * layers
            nbytes = sum(span.nbytes for span in spans) / counted
            assert gradients <= nbytes <= gradients + 176  # the tally of the loss, padding
