"""What a worker does in a run: train, look at the communication, judge, and compare with one worker."""

import math
import os
import signal
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import hocket
from hocket.profile import Recorder, no_steps, note, timeline_of
from hocket.timeline import write_perfetto
from hocket.workloads import _scaling
from hocket.workloads._cores import Cores
from hocket.workloads._device import device_of_worker
from hocket.workloads._run import TRACE, RunDirectory, conclude
from hocket.workloads._training import Trainee, train
from hocket.workloads._workload import BundledWorkload, build, settings_from_options

_SMALL_MODEL = 2 * 1024**2  # bytes of gradients


def work(run: RunDirectory, cores: Cores) -> None:
    """Do this worker's part of the run; the first worker writes what comes of it into ``run``."""
    writer = run if int(os.environ.get("RANK", "0")) == 0 else None
    interruption = _Interruption()
    recorder = Recorder()
    try:
        _stages(run.config, cores, recorder, writer)
    except BaseException as error:
        if writer is not None:
            _write_communication(recorder, writer)
            if interruption.came:
                conclude(writer, "interrupted")
            else:
                conclude(writer, "failed", f"{type(error).__name__}: {error}")
        if interruption.came:
            raise KeyboardInterrupt from None
        raise
    if writer is not None:
        conclude(writer, "finished")
    if dist.is_initialized():
        dist.destroy_process_group()


class _Interruption:
    """Ctrl-C, or SIGTERM, which is the launcher's way to end a worker.

    The interruption is remembered, because what arrives at the end may be something else: a backward pass gives
    another exception on, and a peer that was interrupted a moment earlier is missed first.
    """

    def __init__(self) -> None:
        self.came = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> NoReturn:
        self.came = True
        raise KeyboardInterrupt


def _stages(config: dict[str, Any], cores: Cores, recorder: Recorder, writer: RunDirectory | None) -> None:
    settings = settings_from_options(config["workload"], config["settings"])
    torch.manual_seed(settings.seed)
    workload, device = build(settings), device_of_worker(settings.device)
    module = workload.model().to(device)
    dataset = workload.dataset()
    loader: Any = DataLoader(dataset, batch_size=settings.batch_size, drop_last=True)

    # What a user's own script does; from here on the loop is that of one device.
    model, optimizer, loader = hocket.distribute(
        module, workload.optimizer(module), loader, bucket_bytes=_bucket_bytes(module), seed_samples=False
    )

    world = dist.get_world_size() if dist.is_initialized() else 1
    if writer is not None:
        writer.event("started", **_placement(module, device, cores, world))
    trainee = Trainee(workload, model, optimizer, loader, dataset, device=device, autocast=settings.autocast)
    with recorder:
        training = train(trainee, settings.steps, writer)
    if writer is not None:
        writer.event("trained", **training)
        if compression := model.compression_report():
            writer.event("compressed", **compression)
        _write_communication(recorder, writer)
        _write_trace(recorder, trainee, writer)
    if workload.evaluates:
        if writer is not None:
            writer.event("evaluating")
        quality = workload.evaluate(module, writer.picture if writer is not None else None)
        if writer is not None:
            writer.event("evaluated", **quality)
    if world > 1:
        if writer is not None:
            writer.event("scaling")
        alone, share = None, math.ceil(settings.batch_size / world)
        if dist.get_rank() == 0:
            alone = _alone(workload, module, share, device=device, autocast=settings.autocast)
        with no_steps():
            scaling = _scaling.measure(trainee, alone, step_s=training["step_s"], budget_s=training["training_s"])
        note("alone_step_s", share / scaling["one_samples_per_s"])
        if writer is not None:
            writer.event("scaled", samples_per_worker=share, **scaling)


def _alone(
    workload: BundledWorkload[Any], trained: nn.Module, batch_size: int, *, device: torch.device, autocast: bool
) -> Trainee:
    """Return a worker on its own with the same weights, its own optimizer and a plain loader."""
    module = workload.model().to(device)
    module.load_state_dict(trained.state_dict())
    dataset = workload.dataset()
    loader: Any = DataLoader(dataset, batch_size=batch_size, drop_last=True)
    optimizer = workload.optimizer(module)
    return Trainee(workload, module, optimizer, loader, dataset, device=device, autocast=autocast)


def _bucket_bytes(module: nn.Module) -> int | None:
    """Return Hocket's own choice, but two buckets for a model so small that it would get one, which nothing hides."""
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    return math.ceil(nbytes / 2) if nbytes <= _SMALL_MODEL else None


def _placement(module: nn.Module, device: torch.device, cores: Cores, world: int) -> dict[str, Any]:
    return {
        "workers": world,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "gpus": torch.cuda.device_count() if device.type == "cuda" else 0,
        "cores": str(cores),
        "threads": torch.get_num_threads(),
        "exclusive_cores": cores.exclusive,
        "cores_in_all": len(cores.mine) * (world if cores.exclusive else 1),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "bucket_bytes": _bucket_bytes(module),
        "torch": torch.__version__,
        "hocket": hocket.__version__,
    }


def _write_trace(recorder: Recorder, trainee: Trainee, writer: RunDirectory) -> None:
    """Write the last steps of this worker as `hocket compare` and Perfetto read them."""
    timeline = timeline_of(recorder, list(trainee.times), rank=dist.get_rank() if dist.is_initialized() else 0)
    write_perfetto(timeline, writer.path / TRACE)


def _write_communication(recorder: Recorder, writer: RunDirectory) -> None:
    """Write what the recorder has heard so far: the single operations, and what they add up to."""
    writer.add_events(recorder.events())
    writer.event(
        "profiled",
        bins=[row.to_json() for row in recorder.histogram()],
        hidden_share=recorder.hidden_share(),
        communication_s=recorder.communication_s(),
        exposed_s=recorder.exposed_s(),
        paths=recorder.paths(),
    )
