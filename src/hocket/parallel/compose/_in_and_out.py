"""A composed model's state, out and in: checkpoints, whole state dicts, folders of safetensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..batches import own_generators, put_back_generators, state_of
from ..state import alike, checkpoint, sources, whole
from ._composition import Composition


def save(composition: Composition, path: Path, about: Mapping[str, Any], extra: Any) -> None:
    """See `Trainer.save`."""
    composition.buffers.send()
    world = composition.mesh.whole
    computed = composition.outline.computed_state(composition.model, world)
    others = _held_before(composition)
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
