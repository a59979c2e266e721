"""Other libraries that do beside `hocket.distribute` what it does: average gradients, or choose each rank's samples."""

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hocket._program import warn

from ..batches import batch as _batch
from ..batches import divides_itself
from ..mesh import World

TWICE = (
    "hocket.distribute averages this model's gradients already, and DistributedDataParallel would do it again: take "
    'one of the two (for the latter on Hocket\'s backend: dist.init_process_group("hocket"))'
)
_LOOKS = 4  # at metrics
_ASKED = "_ddp_params_and_buffers_to_ignore"  # what DistributedDataParallel asks a model for, first of all


class RefusesOthers:
    """Stands in a distributed model for what DistributedDataParallel asks for, and refuses it while that model is used.

    The loop may still hold the model itself, and a Trainer of another library may wrap that one.
    """

    def __init__(self, owner: Any, ignored: list[str]) -> None:
        self._owner, self._ignored = weakref.ref(owner), ignored

    def __iter__(self) -> Iterator[str]:
        if self._owner() is not None:
            raise ValueError(TWICE)
        return iter(self._ignored)

    def __reduce__(self) -> Any:  # a copy or a pickle of the model is nobody's
        return list, (self._ignored,)


def refuse_others(module: torch.nn.Module, owner: Any) -> None:
    """Have DistributedDataParallel refuse `module` as long as `owner` lives."""
    setattr(module, _ASKED, RefusesOthers(owner, list(getattr(module, _ASKED, ()))))


def tell_own_batches(world: World) -> bool:
    """Warn if the loop's batches come from a loader of Accelerate's that makes others of them than one device.

    Return whether one of its loaders was there.
    """
    accelerate: Any = sys.modules.get("accelerate.state")  # what is not loaded has divided nothing
    shared = getattr(accelerate, "GradientState", None)
    if shared is None or not shared._shared_state:
        return False
    if (loader := getattr(shared(), "active_dataloader", None)) is None:
        return False
    divided = divides_itself(loader)
    if divided == "batches" and world.rank == 0:
        warn(
            f"Accelerate's loader takes a batch for each rank, so that a step is one of {world.size} times as many "
            "samples as the loader's batch_size says, and an epoch has fewer steps than on one device: give the "
            "plain loader to hocket.distribute (its batch size is global), or say "
            "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))",
        )
    elif divided == "samples" and world.rank == 0 and (left := _completed(loader)):
        warn(
            f"Accelerate's loader completes the last batch, of {left}, with samples of the first ones, which count "
            "twice in an epoch: give the plain loader to hocket.distribute, which weighs an uneven batch as one "
            "device does, or say drop_last=True, on one device, too",
        )
    return True


def _completed(loader: Any) -> int:
    """Return how many samples are left for the last batch, if they are not a whole one and the loader adds others."""
    left = getattr(loader, "remainder", 0)
    adds = getattr(getattr(loader, "batch_sampler", None), "even_batches", True)
    return left if isinstance(left, int) and left > 0 and adds else 0


def tell_own_schedules(world: World, optimizers: Iterable[Any]) -> None:
    """Warn if a schedule that changes these optimizers' settings is one of Accelerate's that goes on for each rank.

    It stands for loops whose step has a batch for each rank, which global batches are not. All objects of the program
    are gone through, but only where Accelerate has several processes.
    """
    state: Any = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    kind = getattr(sys.modules.get("accelerate.scheduler"), "AcceleratedScheduler", None)
    times = getattr(state, "_shared_state", {}).get("num_processes", 1)
    if kind is None or not isinstance(times, int) or times < 2 or world.rank:
        return
    trained = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    for one in gc.get_objects():
        if type(one) is not kind or one.split_batches or not one.step_with_optimizer:
            continue
        groups = getattr(getattr(one.scheduler, "optimizer", None), "param_groups", ())
        if any(id(p) in trained for group in groups for p in group["params"]):
            warn(
                f"Accelerate's schedule of the learning rate goes {times} steps in each step of the loop, as if that "
                "were one of as many batches, and Hocket's batches are global: leave the schedule out of "
                "accelerator.prepare, or say Accelerator(step_scheduler_with_optimizer=False). It is right only if its "
                "length is given in so many times the steps",
            )
            return


class OwnMetrics:
    """Looks whether torchmetrics counts a sample that stands in for none, and tells of the first metric that does.

    All objects of the program are gone through, but only where that library is loaded, and in few batches.
    """

    def __init__(self) -> None:
        self._note: _batch.Note | None = None
        self._before: list[tuple[Any, int]] = []  # metrics, and how often they had been updated
        self._looks = _LOOKS

    def next(self, note: _batch.Note | None) -> None:
        """Look, until this is called again, if the rank has no samples of the batch that comes; None: none comes."""
        if note is self._note:  # another model has told of it
            return
        counted = [one for one, updates in self._before if one._update_count > updates]
        if counted and self._note is not None and self._note.share is not None:
            self._looks = 0
            total = self._note.share.total
            warn(
                f"{type(counted[0]).__name__} of torchmetrics was updated in a batch of {total} "
                f"sample{'s' * (total > 1)}, of which this rank has none: it counts a sample that stands in for them, "
                "and one device does not. Leave such batches out (DataLoader(..., drop_last=True)), or choose "
                "batch_size so that the last batch has a sample for each rank"
            )
        self._note, self._before = note, []
        kind = getattr(sys.modules.get("torchmetrics"), "Metric", None)
        if kind is None or note is None or note.share is None or note.share.samples or not self._looks:
            return
        self._looks -= 1
        self._before = [
            (one, one._update_count)
            for one in gc.get_objects()
            if issubclass(type(one), kind) and hasattr(one, "_update_count")
        ]
