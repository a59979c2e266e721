"""Outputs of the model for a whole batch, on every rank, under any plan."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hocket.comm import torch_adapter

from ..batches import BatchShard, Cutter, Keywords, RandomStream, RngStates, SharedLoader, called, mapped, tensors_in
from ..batches import batch as _batch
from ..mesh import World
from ..pipeline import Micro, Pipeline
from ._composition import Composition
from ._passes import check_together
from ._same_batch import SameBatch

_MASK = "attention_mask"
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"use_cache": (False,), "return_dict": (True,)}
_CACHES = {"cache", "cache_params", "past_key_values"}  # what keys and values are kept in for the next call


class Predictor:
    """Runs the model on global batches that every rank has, and gives every rank the global output.

    The batch is divided among data-parallel ranks and into micro-batches where that gives the same output. That is
    tried once for inputs of a kind: two samples are computed together and each alone. Where an output is not made of
    the samples' own (a mean over the batch, a cache of keys and values), every rank computes the whole batch. `sample`
    are the inputs that a pipeline was made for.
    """

    def __init__(self, composition: Composition, sample: Any, taken: Keywords) -> None:
        self._taken = taken
        self._composition = composition
        self._data: World = composition.mesh["data"]
        self._pipeline: Pipeline | None = composition.passes.pipeline
        self._divisible: dict[bytes, bool] = {}
        self._same = SameBatch(composition.mesh.whole, "trainer.predict")
        if self._pipeline is not None:
            order = list(inspect.signature(composition.model.forward).parameters)
            named = isinstance(sample, Mapping)
            names = [*(n for n in order if n in sample), *(n for n in sample if n not in order)] if named else None
            composition.model.forward = _staged(composition, self._pipeline, names or order[: len(sample)], named)

    def batches(self, given: Any, targets: bool) -> Iterator[Any]:
        """Yield the inputs of each global batch of a loader, alike on every rank; not the last value if `targets`."""
        loader = given.loader if isinstance(given, SharedLoader) else given
        random = RandomStream(self._composition.mesh.whole.from_root(RngStates.now()))
        with random:
            batches = iter(loader)
        while True:
            with random:
                batch = next(batches, self)
            if batch is self:
                return
            yield self.inputs(batch, targets)

    def inputs(self, batch: Any, targets: bool) -> Any:
        """Return the model's inputs of a batch: one value, its keywords, or all of a tuple or list but the target."""
        if isinstance(batch, Mapping):
            return self._taken(batch)
        if not isinstance(batch, tuple | list):
            return (batch,)
        return tuple(batch[:-1] if targets and len(batch) > 1 else batch)

    def output(self, inputs: Any) -> Any:
        """Return the model's output for a global batch; a collective operation."""
        inputs, data = self._global(inputs), self._data
        self._same.compare(inputs)
        most = 1 if self._pipeline is None else self._composition.plan.micro_batches
        cutter = Cutter(None)
        samples = cutter.size(inputs) if data.size * most > 1 else 0
        if samples < 2 or not self._divides(inputs, cutter):
            return self._run(inputs, 1)
        if samples < data.size:
            return self._run(inputs, min(most, samples))
        shard = BatchShard.of(samples, data.size, data.rank)
        if data.size == 1:
            return self._run(inputs, min(most, samples))
        mine = cutter.cut(inputs, shard.begin, shard.end)
        return self._gathered(self._run(mine, min(most, samples // data.size)), samples)

    def _run(self, inputs: Any, micro_batches: int) -> Any:
        if self._pipeline is None:
            return called(self._composition.model, inputs)

        def join(outputs: list[Any], _: list[Micro]) -> Any:
            return joined(outputs)

        return self._pipeline.forward(inputs, everywhere=True, micro_batches=micro_batches, join=join)

    def _divides(self, inputs: Any, cutter: Cutter) -> bool:
        """Return whether the batch may be divided: tried once for inputs of a kind, by two samples that differ."""
        key = _outline(inputs)
        if key is not None and key in self._divisible:
            return self._divisible[key]
        both, first, second = (cutter.cut(inputs, begin, end) for begin, end in ((0, 2), (0, 1), (1, 2)))
        if all(torch.equal(a, b) for a, b in zip(tensors_in(first), tensors_in(second), strict=True)):
            return False
        try:
            divides = _apart(*(self._run(part, 1) for part in (both, first, second)))
        except (RuntimeError, ValueError):  # such small batches are refused, and so on every rank
            divides = False
        divides = self._composition.mesh.whole.from_root(divides)
        if key is not None:
            self._divisible[key] = divides
        return divides

    def _global(self, inputs: Any) -> Any:
        """Return the global inputs, where a loader of `Trainer.batches` has yielded this rank's part of them."""
        if self._data.size == 1:
            return inputs
        # A part of a batch may share its memory with the batch: its place and samples tell, and all ranks must say so.
        note = _batch.current(inputs)
        share = note.share if note is not None and note.holds(inputs) else None
        if share is not None and (share.world != self._data.size or Cutter(None).size(inputs) != max(1, share.samples)):
            share = None
        if not all(self._data.from_all(share is not None)):
            return inputs
        assert share is not None
        everyone = self._data.from_all((share.samples, inputs))
        columns = list(zip(*(tensors_in(part) for samples, part in everyone if samples), strict=True))
        size = max(1, everyone[0][0])
        source = iter([torch.cat(column) if column[0].ndim and len(column[0]) == size else column[0]
                       for column in columns])  # fmt: skip
        return mapped(inputs, lambda _: next(source))

    def _gathered(self, mine: Any, samples: int) -> Any:
        """Return the global output of those of the data-parallel ranks' parts, on every rank."""
        data, tensors = self._data, tensors_in(mine)
        shards = [BatchShard.of(samples, data.size, rank) for rank in range(data.size)]
        own = shards[data.rank].samples
        fits = all(tensor.ndim and len(tensor) == own for tensor in tensors)
        everyone = data.from_all([tuple(tensor.shape[1:]) for tensor in tensors] if fits else None)
        if None in everyone or any(other != everyone[0] for other in everyone):
            raise ValueError(
                f"parts of the batch gave outputs of different shapes ({everyone}), which cannot be joined; call "
                "predict with batches whose samples have outputs of one shape"
            )
        whole = [tensor.new_empty((samples, *tensor.shape[1:])) for tensor in tensors]
        for tensor, all_of_it in zip(tensors, whole, strict=True):
            for rank, shard in enumerate(shards):
                part = all_of_it[shard.begin : shard.end]
                if rank == data.rank:
                    part.copy_(tensor)
                dist.broadcast(part, group=data.group, group_src=rank)
        source = iter(whole)
        return mapped(mine, lambda _: next(source))


def _staged(composition: Composition, pipeline: Pipeline, names: Sequence[str], named: bool) -> Any:
    """Return what stands for the model's own forward, which its stages make together: all ranks call it alike.

    So a loop that generates, or Hugging Face's `generate(use_cache=False)`, can call the model under every plan.
    """
    model = composition.model

    def forward(*args: Any, **kwargs: Any) -> Any:
        check_together(model)
        derived = model.training or any(one.requires_grad for one in tensors_in([args, kwargs]))
        if torch.is_grad_enabled() and derived:
            raise RuntimeError("a model in a pipeline is trained by trainer.step; call it under torch.no_grad()")
        values = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name in names and name not in values:
                values[name] = value
            elif not _neutral(name, value):
                if name == "use_cache" or _is_cache(name, value):
                    raise TypeError(
                        f"{name}= has no place in the stages of this pipeline, which keep no keys and values from call "
                        "to call: say use_cache=False, as in trainer.model.generate(ids, use_cache=False)"
                    )
                raise TypeError(
                    f"{name}= has no place in the stages of this pipeline, which were made for a sample of "
                    f"{', '.join(names)}; leave it out, or give it in Trainer(..., sample=)"
                )
        if len(args) > len(names) or (set(values) != set(names) if named else list(values) != list(names)):
            raise TypeError(
                f"the stages of this pipeline were made for a sample of {', '.join(names)}, and this call gives "
                f"{', '.join(values) or 'nothing'} ({len(args)} by position)"
            )
        composition.finish()
        inputs = {name: values[name] for name in names} if named else tuple(values.values())
        output = pipeline.forward(inputs, everywhere=True, micro_batches=1)
        return _without_cache(output) if kwargs.get("use_cache", True) is False else output

    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_KEYWORD
    parameters = [*(inspect.Parameter(name, kinds[0]) for name in names), inspect.Parameter("kwargs", kinds[1])]
    return _OfThisModel(forward, inspect.Signature(parameters))


class _OfThisModel:
    """A forward that copies of its model do not have."""

    def __init__(self, forward: Any, signature: inspect.Signature) -> None:
        self._forward = forward
        self.__signature__ = signature
        self.__code__ = forward.__code__  # torch.export looks at it before it calls the model, which refuses

    @torch_adapter.outside_compiler
    @torch_adapter.outside_inference_mode  # stages keep tensors for later steps
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return _of_a_copy


def _of_a_copy(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "a copy of a model in a pipeline has the weights of this rank's stages alone, and cannot be called: write its "
        "weights into those of trainer.model, parameter by parameter, and call that or trainer.evaluate"
    )


def is_loader(given: Any) -> bool:
    """Return whether it is to give batches, and is no batch itself; a list of tuples or lists is a loader."""
    if isinstance(given, list):
        return bool(given) and all(isinstance(item, tuple | list) for item in given)
    batch = isinstance(given, torch.Tensor | tuple | Mapping | str | bytes) or hasattr(given, "__array__")
    return isinstance(given, Iterable) and not batch


def joined(outputs: Iterable[Any]) -> Any:
    """Return the outputs of several batches as that of one, joined along the samples; ValueError for other shapes."""
    parts = list(outputs)
    if len(parts) < 2:
        return parts[0] if parts else None
    columns = [list(column) for column in zip(*map(tensors_in, parts), strict=True)]
    if any(one.ndim == 0 or one.shape[1:] != column[0].shape[1:] for column in columns for one in column):
        raise ValueError(
            "the outputs of the loader's batches have different shapes, or none for each sample, so they cannot be "
            "joined; call predict with each batch"
        )
    source = iter([torch.cat(column) for column in columns])
    return mapped(parts[0], lambda _: next(source))


def _neutral(name: str, value: Any) -> bool:
    """Return whether an argument that a stage does not take says what is so without it, in Hugging Face's words."""
    if name == _MASK and isinstance(value, torch.Tensor):
        return bool(value.all())
    return value is None or any(value is one for one in _NEUTRAL.get(name, ()))


def _is_cache(name: str, value: Any) -> bool:
    return name in _CACHES or any(kind.__name__ == "Cache" for kind in type(value).__mro__)


def _without_cache(output: Any) -> Any:
    """Return an output without the cache that stages give which were made of a model that gives one."""
    if not isinstance(output, Mapping) or not any(_is_cache(*item) for item in output.items()):
        return output
    kept: Any = {name: value for name, value in output.items() if not _is_cache(name, value)}
    return kept if type(output) is dict else type(output)(**kept)


def _apart(both: Any, first: Any, second: Any) -> bool:
    """Return whether an output of two samples is those of each alone, side by side, up to rounding."""
    outline = _outline(both)
    if outline is None or any(_outline(one) != outline for one in (first, second)):
        return False
    columns = list(zip(*map(tensors_in, (both, first, second)), strict=True))
    for together, *alone in columns:
        if not together.ndim or len(together) != 2 or any(one.shape != (1, *together.shape[1:]) for one in alone):
            return False
        parts = torch.cat(alone)
        if not parts.is_floating_point():
            if not torch.equal(together, parts):
                return False
            continue
        largest = float(parts.abs().nan_to_num(0, 0, 0).max()) if parts.numel() else 0.0
        tolerance = min(1e3 * torch.finfo(parts.dtype).eps, 5e-2) * largest
        if not torch.allclose(together.double(), parts.double(), 0, tolerance, equal_nan=True):
            return False
    return bool(columns)


def _outline(value: Any) -> bytes | None:
    """Return bytes that are equal for structures that differ in the sizes and numbers of tensors at most.

    None where that cannot be told.
    """
    try:
        return pickle.dumps(mapped(value, lambda one: torch.empty((0,) * one.ndim, dtype=one.dtype, device="meta")))
    except Exception:
        return None
