"""Other libraries that do beside `hocket.distribute` what it does: average gradients, or choose each rank's samples."""

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from hocket._program import warn

from ..batches import divides_itself
from ..mesh import World

TWICE = (
    "hocket.distribute averages this model's gradients already, and DistributedDataParallel would do it again: take "
    'one of the two (for the latter on Hocket\'s backend: dist.init_process_group("hocket"))'
)
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
    """Warn if the loop's batches come from a loader of Accelerate's that takes a whole batch for each rank.

    Return whether one of its loaders was there.
    """
    accelerate: Any = sys.modules.get("accelerate.state")  # what is not loaded has divided nothing
    shared = getattr(accelerate, "GradientState", None)
    if shared is None or not shared._shared_state:
        return False
    if (loader := getattr(shared(), "active_dataloader", None)) is None:
        return False
    if divides_itself(loader) == "batches" and world.rank == 0:
        warn(
            f"Accelerate's loader takes a batch for each rank, so that a step is one of {world.size} times as many "
            "samples as the loader's batch_size says, and an epoch has fewer steps than on one device: give the "
            "plain loader to hocket.distribute (its batch size is global), or say "
            "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))",
        )
    return True
