"""The loop that trains a workload: a user's loop, with public names only."""

import gc
import math
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import hocket
from hocket.workloads._run import RunDirectory
from hocket.workloads._workload import Batch, BundledWorkload

_LINE_S = 0.5  # a line of metrics about this often
_MOST_STEPS_PER_LINE = 100
_STEPS_OF_TRACE = 50


class Diverged(RuntimeError):
    """The loss is no finite number any more."""


class Trainee:
    """A model in training; `step` makes one step and goes on from epoch to epoch without end."""

    def __init__(
        self,
        workload: BundledWorkload[Any],  # how it is trained
        model: nn.Module,  # the module to call, on ``device``
        optimizer: torch.optim.Optimizer,  # its optimizer
        loader: Any,  # batches of ``dataset``
        dataset: Dataset[Batch],  # the training data
        *,
        device: torch.device,  # where to compute
        autocast: bool,  # whether the forward pass may use bfloat16
    ) -> None:
        self.epoch = 0
        self.steps = 0
        self.learning_rate = 0.0
        # when each of the last 50 steps began and ended, in perf_counter seconds
        self.times: deque[tuple[float, float]] = deque(maxlen=_STEPS_OF_TRACE)
        self.device = device
        self._workload = workload
        self._model = model
        self._optimizer = optimizer
        self._autocast = autocast
        self._batches = self._epochs(loader, dataset)

    def step(self) -> tuple[int, Tensor]:
        """Do one step; return how many samples this worker had, and the mean loss over them."""
        begin_s = time.perf_counter()
        batch = next(self._batches)
        self.learning_rate = self._workload.learning_rate(self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        self._optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            output = self._model(*batch[:-1])
        loss = self._workload.loss_fn(output, batch[-1])
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self.steps += 1
        self.times.append((begin_s, time.perf_counter()))
        return len(batch[0]), loss.detach()

    def synchronise(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _epochs(self, loader: Any, dataset: Dataset[Batch]) -> Iterator[Batch]:
        while True:
            self._workload.start_epoch(dataset, self.epoch)
            for batch in loader:
                yield cast(Batch, tuple(part.to(self.device, non_blocking=True) for part in batch))
            self.epoch += 1


class _Meter:
    """Counts samples and loss of all workers between two lines of the metrics."""

    def __init__(self, device: torch.device) -> None:
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._device = device
        self._samples = 0
        self._loss_sum = torch.zeros((), dtype=torch.float64)
        self._since_s = time.perf_counter()

    def add(self, samples: int, loss: Tensor) -> None:
        """Count a step of this worker; the device is not waited for."""
        self._samples += samples
        self._loss_sum = self._loss_sum.to(loss.device) + loss.to(torch.float64) * samples

    def read(self) -> tuple[float, int, float]:
        """Mean loss, samples and seconds since the last reading, over all workers; all of them get the same answer."""
        loss_sum = float(self._loss_sum)  # waits for the device
        now_s = time.perf_counter()
        mine = torch.tensor([loss_sum, float(self._samples), now_s - self._since_s], dtype=torch.float64)
        loss_of_all, samples_of_all, seconds_of_all = hocket.total(mine).tolist()
        self._samples, self._loss_sum, self._since_s = 0, torch.zeros_like(self._loss_sum), now_s
        return loss_of_all / samples_of_all, int(samples_of_all), seconds_of_all / self._world


def train(trainee: Trainee, steps: int, run: RunDirectory | None) -> dict[str, Any]:
    """Make ``steps`` steps and write the metrics on the way. Every worker calls it.

    A line of the metrics covers all samples of all workers since the line before. The first step is a line of its own,
    and is left out of the throughput: it sets up kernels, buffers and the optimizer's state. Raises Diverged if the
    loss is not finite.

    Args:
        trainee: What to train.
        steps: How many steps to make.
        run: Where to write; given to one worker only.

    Returns:
        JSON values: "steps", "samples", "training_s", "samples_per_s", "step_s", "loss" (of the last line). All
        workers get the same.
    """
    meter = _Meter(trainee.device)
    samples = warm_samples = 0
    elapsed_s = warm_s = loss = 0.0
    next_line = 1
    gc.collect()
    gc.freeze()  # what is there stays to the end: looking through it took 3% of a step of EDSR
    for step in range(1, steps + 1):
        meter.add(*trainee.step())
        if step < next_line:
            continue
        loss, line_samples, line_s = meter.read()
        samples, elapsed_s = samples + line_samples, elapsed_s + line_s
        if step > 1:
            warm_samples, warm_s = warm_samples + line_samples, warm_s + line_s
        step_s = warm_s / (step - 1) if step > 1 else elapsed_s
        samples_per_s = line_samples / line_s
        if run is not None:
            run.metric(
                step=step,
                epoch=trainee.epoch,
                loss=loss,
                samples=samples,
                elapsed_s=elapsed_s,
                samples_per_s=samples_per_s,
                left_s=(steps - step) * step_s,
                lr=trainee.learning_rate,
            )
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss became {loss} by step {step}, at learning rate {trainee.learning_rate:.2g}; use a lower --lr"
            )
        interval = max(1, min(_MOST_STEPS_PER_LINE, round(_LINE_S / step_s)))
        # The last line gets what would be too little for a line of its own.
        next_line = steps if step + 2 * interval > steps else step + interval
    gc.unfreeze()
    return {
        "steps": steps,
        "samples": samples,
        "training_s": elapsed_s,
        "samples_per_s": warm_samples / warm_s if warm_s else samples / elapsed_s,
        "step_s": step_s,
        "loss": loss,
    }
