"""What ranks do in the tests of how a pipeline runs."""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hocket.parallel.mesh.world import current
from hocket.parallel.pipeline import Pipeline, Stage, idle_shares, split
from hocket.parallel.pipeline._trace import trace
from hocket.testing import deadline

from .models import MODELS

Tensor = torch.Tensor


class KeptBytes:
    """The most bytes that autograd keeps at a time."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda box: box.tensor)

    def _pack(self, tensor: Tensor) -> Any:
        return _Box(self, tensor)

    def __enter__(self) -> KeptBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


class _Box:
    def __init__(self, counter: KeptBytes, tensor: Tensor) -> None:
        self.tensor = tensor
        self._counter = counter
        self._nbytes = 0 if isinstance(tensor, nn.Parameter) else tensor.numel() * tensor.element_size()
        counter.now += self._nbytes
        counter.most = max(counter.most, counter.now)

    def __del__(self) -> None:
        self._counter.now -= self._nbytes


def split_of(name: str, per_rank: int = 1) -> tuple[Any, list[Stage]]:
    made = MODELS[name]
    torch.manual_seed(1)
    model = made.made()
    world = current()
    *sample, _ = made.batch_of(0, 4)
    even = [1.0] * len(trace(model, sample).steps)  # the same split whenever it is made
    return model, split(model, world.size * per_rank, sample, times=even)


def pipeline_with(name: str, stages: list[Stage], **settings: Any) -> Pipeline:
    world = current()
    return Pipeline(stages[world.rank :: world.size], world, loss_fn=MODELS[name].loss_fn, **settings)


def pipeline_of(name: str, per_rank: int = 1, **settings: Any) -> tuple[Any, Pipeline, list[Stage]]:
    model, stages = split_of(name, per_rank)
    return model, pipeline_with(name, stages, **settings), stages


def gradients(pipeline: Pipeline) -> dict[str, Any]:
    return {
        name: None if parameter.grad is None else parameter.grad.numpy()
        for stage in pipeline.stages
        for name, parameter in stage.parameters().items()
    }


def recomputed() -> dict[str, Any]:
    """Losses, gradients, running statistics and most bytes kept, without and with recomputation, by schedule."""
    found = {}
    for model in ("mlp", "cnn, frozen norms", "gpt", "cnn"):
        whole, stages = split_of(model)  # once: each run begins with its numbers, and leaves all but buffers as it was
        before = copy.deepcopy(whole.state_dict())
        for schedule in ("gpipe", "1f1b", "zero_bubble"):
            for how in ("none", "stage", "layer"):
                whole.load_state_dict(before)
                whole.zero_grad()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    pipeline = pipeline_with(model, stages, micro_batches=4, schedule=schedule, recompute=how)
                *inputs, target = MODELS[model].batch_of(1, 16)
                with KeptBytes() as kept:
                    loss = pipeline.step(inputs, target)
                buffers = {n: b.numpy().copy() for s in pipeline.stages for n, b in s.module.named_buffers()}
                found[model, schedule, how] = (float(loss), gradients(pipeline), buffers, kept.most)
    return found


class Ragged(nn.Module):
    """What crosses the cut has a length that depends on the numbers in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        keep = x[:, 0] > 0
        y = self.a(x[keep])
        out = torch.zeros(len(x), 5, dtype=x.dtype)
        out[keep] = self.b(y)
        return out


def forward_everywhere() -> tuple[Any, Any]:
    """What every rank gets, and the model's own."""
    model, pipeline, _ = pipeline_of("gpt", micro_batches=4)
    *inputs, _ = MODELS["gpt"].batch_of(5, 10)
    model.eval()
    with torch.no_grad():
        return pipeline.forward(inputs, everywhere=True).numpy(), model(*inputs).numpy()


def odds_and_ends() -> dict[str, Any]:
    """Small facts about pipelines, each by a name."""
    world = current()
    found: dict[str, Any] = {}
    model, pipeline, stages = pipeline_of("gpt", micro_batches=4)
    *inputs, target = MODELS["gpt"].batch_of(5, 10)
    model.eval()
    with torch.no_grad():
        expected = model(*inputs)
        expected_loss = MODELS["gpt"].loss_fn(expected, target)
    found["evaluate"] = (float(pipeline.evaluate(inputs, target)), float(expected_loss))
    found["forward everywhere"] = (pipeline.forward(inputs, everywhere=True).numpy(), expected.numpy())
    found["forward"] = pipeline.forward(inputs) is not None
    found["holds last"] = pipeline.holds_last
    found["tied"] = len(pipeline.tied)
    model.train()
    for weight in (1.0, 0.25):
        for stage in stages:
            stage.module.zero_grad()
        found[f"weight {weight}"] = (float(pipeline.step(inputs, target, weight)), gradients(pipeline))
    once = {name: gradient.copy() for name, gradient in gradients(pipeline).items()}
    pipeline.step(inputs, target, 0.25)
    found["accumulated"] = (gradients(pipeline), {name: 2 * gradient for name, gradient in once.items()})
    found["spans"] = sorted(str(span.action) for span in pipeline.spans)
    found["busy"] = all(span.begin_s <= span.end_s for span in pipeline.spans)

    order: list[str] = []
    _, told, _ = pipeline_of(
        "mlp",
        2,
        micro_batches=4,
        schedule="zero_bubble",
        on_last_backward=lambda stage: order.append(f"last {stage.index}"),
        on_gradients=lambda stage: order.append(f"done {stage.index}"),
    )
    *inputs, target = MODELS["mlp"].batch_of(5, 10)
    told.step(inputs, target)
    found["told"] = order

    torch.manual_seed(0)
    ragged = Ragged().double()
    parts = split(ragged, 2, (MODELS["mlp"].batch_of(0, 8)[0],), points=("b",))[world.rank :: world.size]
    *inputs, target = MODELS["mlp"].batch_of(7, 16)
    pipe = Pipeline(parts, world, "gpipe", 2, F.cross_entropy)
    loss = float(pipe.step(inputs, target))
    found["ragged"] = (loss, float(F.cross_entropy(ragged(*inputs), target).detach()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, norms = split_of("cnn")
        pipeline_with("cnn", norms, micro_batches=4)
        pipeline_with("cnn", norms, micro_batches=1)
        pipeline_of("cnn, frozen norms", micro_batches=4)
    found["norms"] = [str(w.message) for w in caught if "batch norm" in str(w.message)]
    found["refusals"] = []
    _, layers = split_of("mlp")
    for settings in (
        {"schedule": "pipedream"},
        {"schedule": "interleaved", "micro_batches": 5},
        {"schedule": "1f1b", "micro_batches": 0},
        {"recompute": "all"},
        {"loss_reduction": "max"},
    ):
        try:
            pipeline_with("mlp", layers, **settings)
        except ValueError as error:
            found["refusals"].append(str(error))
    try:
        Pipeline(stages, world, "gpipe", 2)
    except ValueError as error:
        found["wrong stages"] = str(error)
    return found


def data_dependent_shape() -> str:
    """The error of a pipeline whose messages change their shape although it was told that they do not."""
    world = current()
    ragged = Ragged().double()
    parts = split(ragged, 2, (MODELS["mlp"].batch_of(0, 8)[0],), points=("b",))[world.rank :: world.size]
    pipe = Pipeline(parts, world, "gpipe", 2, F.cross_entropy, fixed_shapes=True)
    *inputs, target = MODELS["mlp"].batch_of(7, 16)
    pipe.step(inputs, target)
    return "no error"


class Wait(torch.autograd.Function):
    """Leaves the core to others for a time, twice as long backward: two stages on one core compute side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(deadline(0.02))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(deadline(0.04))
        return gradients[0]


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return Wait.apply(x + self.bias)


def idle() -> dict[tuple[str, int], float]:
    """Mean idle share of the ranks by schedule and micro-batches, the least of four steps."""
    world = current()
    model = nn.Sequential(*[Waiting() for _ in range(world.size)])
    points = [str(i) for i in range(1, world.size)]
    mine = split(model, world.size, (torch.randn(2, 8),), points=points, verify=False)[world.rank :: world.size]
    found = {}
    for schedule, micro in (("gpipe", 2), ("1f1b", 6)):
        pipeline = Pipeline(mine, world, schedule, micro, F.mse_loss)
        inputs, target = (torch.randn(2 * micro, 8),), torch.zeros(2 * micro, 8)
        shares = []
        for _ in range(4):
            pipeline.step(inputs, target)
            shares.append(sum(idle_shares(world.from_all(pipeline.spans))) / world.size)
        found[schedule, micro] = min(shares)
    return found


def peer_dies() -> tuple[str, float]:
    """How the death of a rank in the middle of a step looks on the other: the error, and after how many seconds."""
    world = current()
    _, pipeline, _ = pipeline_of("mlp", micro_batches=4)
    *inputs, target = MODELS["mlp"].batch_of(0, 16)
    pipeline.step(inputs, target)
    begin_s = time.monotonic()
    if world.rank == 1:
        pipeline.stages[0].module.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        for _ in range(3):
            pipeline.step(inputs, target)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin_s
    return "no error", 0.0


def split_and_profiled() -> int:
    """Split a model, and go on in a profiler, as a program that is debugged or whose coverage is taken does."""
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(4, 6)
    split(model, 2, (x,))
    calls: list[str] = []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        model(x)
    finally:
        sys.setprofile(None)
    return len(calls)
