"""A composed model's state, out and in: checkpoints, whole state dicts, folders of safetensors."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..batches import own_generators, put_back_generators, state_of, tensors_in
from ..state import CheckpointError, alike, checkpoint, sources, whole
from ._composition import Composition


def save(composition: Composition, path: Path, about: Mapping[str, Any], extra: Any) -> None:
    """See `Trainer.save`."""
    composition.buffers.send()
    world = composition.mesh.whole
    computed = composition.outline.computed_state(composition.model, world)
    others = _held_before(composition)
    check_extra(composition, lambda: extra)
    checkpoint.write(
        path,
        [shard for shard in composition.shards() if shard.name not in others],
        [item for item in composition.form.owned if item.name not in others],
        composition.optimizer,
        composition.outline,
        {**about, "computed": computed, "generators": world.from_all(_generators(composition))},
        extra,
        world,
    )


def check_extra(composition: Composition, given: Callable[[], Any]) -> None:
    """Refuse what each rank has of its own part of a parameter: rank 0's would be every rank's when it is loaded.

    `given` gives what is to be kept with a checkpoint. A collective operation.
    """
    world, mine = composition.mesh.whole, list[tuple[Any, int] | None]()
    tensors = composition.outline.tensors
    parts = {name: _local(one) for name, one in composition.parts().items() if name in tensors}
    divided = [one.shape for name, one in parts.items() if one.numel() and tuple(one.shape) != tensors[name][0]]
    shapes = {shape for shape in divided if len(shape) > 1}  # a rank's own vector of a few numbers may be a metric
    if not any(world.from_all(bool(shapes))):
        return
    extra = None
    with suppress(Exception):  # before training what it names may not be there yet
        extra = given()
    for one in tensors_in(extra):
        part = _local(one)
        if part.layout is not torch.strided or part.shape not in shapes:
            mine.append(None)
            continue
        mine.append((tuple(part.shape), zlib.crc32(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)))
    first, *others = world.from_all(mine)
    for found in others:
        for here, there in zip(first, found, strict=False):
            if here is not None and there is not None and here != there:
                raise CheckpointError(
                    f"extra has a tensor of shape {list(here[0])} that is another on each rank, as parts of parameters "
                    "are, and a checkpoint keeps rank 0's extra alone: make averages of weights, and what else is to "
                    "be kept of parameters, of trainer.state_dict(), which is whole on every rank"
                )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    return local


def _held_before(composition: Composition) -> set[str]:
    """Return what earlier stages hold too: tied weights, which each stage may cut in another way."""
    pipeline = composition.mesh["pipeline"]
    if pipeline.size == 1:
        return set()
    held = pipeline.from_all({name for _, names in composition.modules for name in names.values()})
    return set().union(*held[: pipeline.rank])


def load(composition: Composition, path: Path, *, weights_only: bool) -> tuple[dict[str, Any], Any]:
    """See `Trainer.load`; return what `save` was given."""
    about, extra = checkpoint.read(
        path,
        composition.shards(),
        composition.form.owned,
        composition.optimizer,
        composition.outline,
        composition.mesh.whole,
        weights_only=weights_only,
    )
    _set(composition, about["computed"])
    if states := about.get("generators"):  # a rank's, as those of the global generators
        put_back_generators(states[composition.mesh.whole.rank % len(states)], *composition.model.modules())
    return about, extra


def _generators(composition: Composition) -> list[Any]:
    return [state_of(one) for one in own_generators(*composition.model.modules())]


def _set(composition: Composition, computed: Mapping[str, Any]) -> None:
    """Give all ranks the weights that were overwritten, and modules what else they keep."""
    composition.form.publish()
    composition.outline.give(composition.model, computed)


def state_dict(composition: Composition, *, rank0_only: bool) -> OrderedDict[str, Any]:
    """See `Trainer.state_dict`."""
    composition.buffers.send()
    world = composition.mesh.whole
    computed = composition.outline.computed_state(composition.model, world)
    return whole.state_dict(composition.outline, composition.shards(), computed, world, rank0_only=rank0_only)


def load_state_dict(
    composition: Composition, given: Mapping[str, Any] | str | Path, *, strict: bool
) -> sources.IncompatibleKeys:
    """See `Trainer.load_state_dict`."""
    outline, world = composition.outline, composition.mesh.whole
    convert = partial(_converted, composition.model)
    found, computed = sources.load_weights(given, composition.shards(), outline, world, strict=strict, convert=convert)
    _set(composition, computed)
    return found


def _converted(model: Any, folder: Path) -> dict[str, Any] | None:
    """Return the weights of a folder as transformers loads them: it renames and joins tensors of some architectures."""
    kinds = (kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.models."))
    kind: Any = next(kinds, None)
    if kind is None or not (folder / "config.json").exists():
        return None
    made, about = kind.from_pretrained(folder, config=model.config, output_loading_info=True, local_files_only=True)
    lacking = {*about["missing_keys"], *(key for key, *_ in about["mismatched_keys"])}  # it has drawn these
    return {key: value for key, value in made.state_dict().items() if key not in lacking}


def save_model(composition: Composition, folder: Path, max_shard_nbytes: int) -> None:
    """See `Trainer.save_model`."""
    composition.buffers.send()
    world = composition.mesh.whole
    sources.export(folder, composition.outline, composition.shards(), world, max_shard_nbytes=max_shard_nbytes)
    with alike(world):
        if world.rank == 0:
            for name in ("config", "generation_config"):  # Hugging Face's
                config: Any = getattr(composition.model, name, None)
                if hasattr(config, "save_pretrained"):
                    config.architectures = [type(composition.model).__name__]
                    config.save_pretrained(folder)
