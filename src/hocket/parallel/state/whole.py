"""Whole tensors of a model that ranks hold in parts: put together for one rank or all, or handed out, in bundles."""

from __future__ import annotations

import io
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hocket.sharding import set_values

from ..mesh import World
from ._manifest import CheckpointError, alike
from ._shards import Shape, TensorShard

_BUNDLE_NBYTES = 32 * 2**20
_ALIGNMENT_NBYTES = 16
EXTRA_STATE = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """What a model's state dict had, and its optimizer's groups, before a plan divided them."""

    # of each parameter and persistent buffer the shape and type; tied ones once, by their first name. Also those that
    # the model leaves out of its state dict.
    tensors: dict[str, tuple[Shape, torch.dtype]]
    keys: dict[str, str]  # of each key of the state dict the name in `tensors`; tied ones are several with one name
    # all other keys: of what modules keep besides tensors (`get_extra_state`), of sparse buffers, or a hook makes
    computed: tuple[str, ...]
    order: tuple[str, ...]  # all keys, as the model has them
    groups: tuple[tuple[str, ...], ...]  # of each parameter group of the optimizer the names in `tensors`, sorted
    metadata: Any  # versions of modules, as torch keeps them in a state dict

    @classmethod
    def of(cls, model: torch.nn.Module, optimizer: Any) -> ModelOutline:
        """Return that of the user's model, which is not divided yet, and of its optimizer."""
        try:
            state = model.state_dict(keep_vars=True)
        except TypeError:  # the model has a method of its own
            state = torch.nn.Module.state_dict(model, keep_vars=True)
        parameters = dict(model.named_parameters())
        buffers = {name: one for name, one in model.named_buffers() if one.layout is torch.strided}
        names = {id(t): name for named in (buffers, parameters) for name, t in named.items()}
        keys = {key: names[id(value)] for key, value in state.items() if id(value) in names}
        whole = {**parameters, **buffers}
        kept = [*keys.values()]
        if not parameters.keys() <= set(kept):  # the model leaves some out, or nests them: a checkpoint has all
            of_torch = torch.nn.Module.state_dict(model, keep_vars=True).values()
            kept += [*(names[id(value)] for value in of_torch if id(value) in names), *parameters]
            keys = keys or {name: name for name in kept}
        tensors = {name: (tuple(whole[name].shape), whole[name].dtype) for name in dict.fromkeys(kept)}
        groups = tuple(
            tuple(sorted(names[id(p)] for p in group["params"] if id(p) in names)) for group in optimizer.param_groups
        )
        computed = tuple(key for key in state if key not in keys)
        return cls(tensors, keys, computed, tuple(state), groups, getattr(state, "_metadata", None))

    def is_told_by(self, keys: Collection[str]) -> bool:
        """Return whether these keys of a state dict are this model's, and say all of its tensors."""
        return all(key in self.keys for key in keys) and {self.keys[key] for key in keys} == self.tensors.keys()

    def computed_state(self, model: torch.nn.Module, world: World) -> dict[str, Any]:
        """Return what modules keep besides tensors, and their sparse buffers; a collective operation.

        Raises:
            CheckpointError: It is not the same on all ranks.
        """
        buffers = dict(model.named_buffers(remove_duplicate=False)) if self.computed else {}
        mine: dict[str, Any] = {}
        for key in self.computed:
            if key.endswith(EXTRA_STATE):
                mine[key] = model.get_submodule(key.rpartition(".")[0]).get_extra_state()
            elif key in buffers:
                mine[key] = buffers[key].detach().cpu().clone()
        for key, value in mine.items():
            stream = io.BytesIO()
            torch.save(value, stream)  # pickle makes other bytes of a tensor each time
            if len(set(world.from_all(stream.getvalue()))) > 1:
                raise CheckpointError(f"{key!r} of the model's state dict is not the same on all ranks")
        return mine

    def give(self, model: torch.nn.Module, computed: Mapping[str, Any]) -> None:
        """Set what `computed_state` has returned.

        Raises:
            CheckpointError: A sparse buffer has another shape or layout there.
        """
        for key, value in computed.items():
            path, _, local = key.rpartition(".")
            module = model.get_submodule(path)
            buffer = module._buffers.get(local)
            if buffer is None:
                module.set_extra_state(value)
            elif (value.shape, value.layout) != (buffer.shape, buffer.layout):
                raise CheckpointError(
                    f"{key!r} is {value.layout} of shape {list(value.shape)} in what is loaded, and {buffer.layout} of "
                    f"shape {list(buffer.shape)} here"
                )
            else:
                set_values(buffer, value)

    def check_keys(self, missing: Collection[str], unexpected: Collection[str], source: str, *, strict: bool) -> None:
        """Raise CheckpointError if a strict source has not the keys of the model; names up to five of each kind."""
        lines = [f"has no {_some(missing)}"] if missing else []
        lines += [f"has more than the model: {_some(unexpected)}"] if unexpected else []
        if strict and lines:
            hint = ""
            if prefix := _prefix(missing, unexpected):
                hint = (
                    f". Without {prefix!r} its names are those of the model, as where a wrapper has saved it: give "
                    f"load_state_dict a dict with key.removeprefix({prefix!r}) for each key"
                )
            raise CheckpointError(f"{source} is of another model: it {', and '.join(lines)}{hint}")

    def check(self, found: Mapping[str, tuple[Shape, torch.dtype]], source: str, *, casts: bool) -> None:
        """Raise CheckpointError if tensors have not the shapes and types of the model's.

        `found` are shape and type by name, of `source`; with `casts`, floating-point numbers of another type are taken.
        """
        lines = []
        for name, (shape, dtype) in self.tensors.items():
            there = found.get(name, (shape, dtype))
            if there[0] != shape:
                lines.append(f"{name!r} has the shape {list(shape)} here and {list(there[0])} in it")
            elif there[1] != dtype and not (casts and there[1].is_floating_point and dtype.is_floating_point):
                lines.append(f"{name!r} is {dtype} here and {there[1]} in it")
        if lines:
            more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
            raise CheckpointError(f"{source} is of another model: {'; '.join(lines[:5])}{more}")


def _prefix(missing: Collection[str], unexpected: Collection[str]) -> str:
    """Return what all unexpected names begin with where they are the missing ones but for that; "" if there is none."""
    for name in sorted(unexpected)[:1]:
        for prefix in (name.removesuffix(one) for one in missing if name.endswith(f".{one}")):
            if {f"{prefix}{one}" for one in missing} == set(unexpected):
                return prefix
    return ""


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, sorted(names)[:5])) + more


class _Bundle:
    """Tensors in one flat tensor of bytes, which one collective operation moves."""

    def __init__(self, tensors: Mapping[str, tuple[Shape, torch.dtype]], device: torch.device) -> None:
        spans, end = {}, _ALIGNMENT_NBYTES  # the first byte says whether all went well
        for name, (shape, dtype) in tensors.items():
            nbytes = math.prod(shape) * dtype.itemsize
            spans[name] = end, end + nbytes
            end += -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        self.bytes = torch.zeros(end, dtype=torch.uint8, device=device)
        self.tensors = {
            name: self.bytes[slice(*spans[name])].view(dtype).view(shape) for name, (shape, dtype) in tensors.items()
        }

    def box(self, shard: TensorShard) -> torch.Tensor:
        """Return where a shard lies."""
        return self.tensors[shard.name][
            tuple(slice(at, at + size) for at, size in zip(shard.offsets, shard.tensor.shape, strict=True))
        ]


def _bundles(
    tensors: Mapping[str, tuple[Shape, torch.dtype]], names: Iterable[str], device: torch.device
) -> Iterator[_Bundle]:
    bundle: dict[str, tuple[Shape, torch.dtype]] = {}
    nbytes = 0
    for name in names:
        shape, dtype = tensors[name]
        size = math.prod(shape) * dtype.itemsize
        if bundle and nbytes + size > _BUNDLE_NBYTES:
            yield _Bundle(bundle, device)
            bundle, nbytes = {}, 0
        bundle[name] = tensors[name]
        nbytes += size
    if bundle:
        yield _Bundle(bundle, device)


def gathered(
    shards: Sequence[TensorShard],
    tensors: Mapping[str, tuple[Shape, torch.dtype]],
    names: Iterable[str],
    world: World,
    *,
    rank0_only: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Put whole tensors together, some 32 MiB or one tensor at a time; a collective operation.

    Args:
        shards: What this rank holds.
        tensors: Shape and type of each tensor, by name.
        names: Of the tensors that are wanted, in this order; the same on every rank.
        world: All ranks.
        rank0_only: Whether other ranks than 0 go without.

    Yields:
        Name and values, on the CPU, which hold until the next is asked for; on ranks that go without, the values
        mean nothing.

    Raises:
        CheckpointError: A part of a tensor is on no rank.
    """
    boxes = world.from_all([(shard.name, tuple(shard.offsets), tuple(shard.tensor.shape)) for shard in shards])
    givers: dict[tuple[str, Shape], int] = {}  # of the ranks that hold the same box the first gives it
    elements: dict[str, int] = {}
    for rank, found in enumerate(boxes):
        for name, offsets, shape in found:
            if givers.setdefault((name, offsets), rank) == rank:
                elements[name] = elements.get(name, 0) + math.prod(shape)
    for name, (shape, _) in tensors.items():
        if elements.get(name, 0) < math.prod(shape):
            raise CheckpointError(f"no rank holds all or a part of {name!r}")
    mine: dict[str, list[TensorShard]] = {}
    for shard in shards:
        if givers[shard.name, tuple(shard.offsets)] == world.rank:
            mine.setdefault(shard.name, []).append(shard)
    for bundle in _bundles(tensors, names, world.device):
        for name in bundle.tensors:
            for shard in mine.get(name, ()):
                bundle.box(shard).copy_(shard.tensor)
        if world.size > 1:
            # All but one hold zeros of each byte; the largest is right also where two ranks hold the same element.
            if rank0_only:
                dist.reduce(bundle.bytes, world.root, dist.ReduceOp.MAX, group=world.group)
            else:
                dist.all_reduce(bundle.bytes, dist.ReduceOp.MAX, group=world.group)
        while bundle.tensors:  # let go of it before the next one is made: two would be twice the memory
            name = next(iter(bundle.tensors))
            yield name, bundle.tensors.pop(name).cpu()
        del bundle


def hand_out(
    get: Callable[[str], torch.Tensor],
    shards: Sequence[TensorShard],
    tensors: Mapping[str, tuple[Shape, torch.dtype]],
    names: Iterable[str],
    world: World,
) -> None:
    """Overwrite what every rank holds with rank 0's whole tensors, some 32 MiB or one at once; a collective operation.

    `get` returns a whole tensor, on rank 0; `shards` are what this rank holds, `tensors` shapes and types by name, and
    `names`, the same on every rank, those that are to be overwritten.

    Raises:
        CheckpointError: Rank 0 could not read one; those before it are overwritten.
    """
    mine: dict[str, list[TensorShard]] = {}
    for shard in shards:
        mine.setdefault(shard.name, []).append(shard)
    for bundle in _bundles(tensors, names, world.device):
        failure: Exception | None = None
        if world.rank == 0:
            try:
                for name, tensor in bundle.tensors.items():
                    tensor.copy_(get(name))
            except Exception as error:  # others wait
                failure = error
                bundle.bytes[0] = 1
        if world.size > 1:
            dist.broadcast(bundle.bytes, world.root, group=world.group)
        if bundle.bytes[0]:
            with alike(world):
                if failure is not None:
                    raise CheckpointError(f"{failure}; the weights are partly overwritten")
        for name in bundle.tensors:
            for shard in mine.get(name, ()):
                shard.tensor.copy_(bundle.box(shard))


def state_dict(
    outline: ModelOutline, shards: Sequence[TensorShard], computed: Mapping[str, Any], world: World, *, rank0_only: bool
) -> OrderedDict[str, Any]:
    """Return the whole state dict, on the CPU, tied keys as one tensor; a collective operation.

    Of `computed` see `ModelOutline.computed_state`; with `rank0_only` other ranks get an empty one.

    Raises:
        CheckpointError: A hook of the model adds to its state dict what is neither a parameter nor a buffer.
    """
    if strange := set(outline.computed) - computed.keys():
        raise CheckpointError(f"{min(strange)!r} of the model's state dict is neither a parameter nor a buffer")
    found: dict[str, torch.Tensor] = {}
    wanted = world.rank == 0 or not rank0_only
    for name, tensor in gathered(shards, outline.tensors, outline.tensors, world, rank0_only=rank0_only):
        if wanted:
            found[name] = tensor.clone()
    whole: OrderedDict[str, Any] = OrderedDict()
    if wanted:
        for key in outline.order:
            whole[key] = found[outline.keys[key]] if key in outline.keys else computed[key]
        whole._metadata = outline.metadata  # type: ignore[attr-defined]
    return whole
