"""Finds what can be cut together: layers that make parts, layers that use them up, and what lies between.

A layer that makes parts of its outputs (column) is followed through the recorded calls, by the rules of
`hocket.sharding`, until every part has been used up by layers that add up over parts of their inputs (row). Where
parts meet a tensor that is whole, the layers that made that one are cut as well; where a dim turns out to be
several side by side (queries, keys and values of one matrix), it is cut in so many segments. Whatever else happens
to a part ends the attempt, with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hocket.sharding import (
    NO_ANSWER,
    CannotShard,
    LocalShard,
    NeedsShard,
    Operand,
    OperatorCall,
    Shard,
    apply_rule,
    changes_first,
    leaves,
    mapped,
    placements_of,
)

from ._record import DROPOUTS, Call, RecordedValue, Recording

CHANNEL: dict[type[nn.Module], int] = {
    nn.Linear: -1,
    nn.Conv1d: -2,
    nn.Conv2d: -3,
    nn.Conv3d: -4,
    nn.ConvTranspose1d: -2,
    nn.ConvTranspose2d: -3,
    nn.ConvTranspose3d: -4,
}
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_ATTEMPTS = 16
LAYERS = frozenset(
    ["linear", "batch_norm", "group_norm", "layer_norm", "rms_norm", "prelu", "embedding"]
    + [f"conv{transposed}{n}d" for transposed in ("", "_transpose") for n in (1, 2, 3)]
)
"""What layers with weights call for themselves: there the weights are shards already."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a layer is in a region.

    Attributes:
        kind: "column", "row", "channels" (a layer that works channel by channel, with parts of its parameters),
            "summed" (parameters whole, gradients added up), "dropout", "vocabulary", "heads".
        split: of its output (column), of its input (others); along the features or channels.
        whole: whether the cut side is whole to others.
    """

    kind: str
    split: Shard
    whole: bool = False


@dataclass(slots=True)
class Region:
    """Layers that are cut together or not at all.

    Attributes:
        roles: by layer.
        names: of the layers, in the order of their first call.
        extras: tensors between the layers whose gradients must be added up, one all_reduce each: their bytes, the place
            of the call in the recording, and whether they grow with the batch.
        reason: why the region is cut as it is.
        calls: places in the recording of what happens on parts.
        parts: the values of which every rank has a part.
        gathers: layers of other regions whose inputs in those places are parts of the sequence.
        scatters: layers of other regions whose outputs are to be parts of the sequence.
    """

    roles: dict[nn.Module, Role]
    names: list[str] = field(default_factory=list)
    extras: list[tuple[int, int, bool]] = field(default_factory=list)
    reason: str = ""
    calls: list[int] = field(default_factory=list)
    parts: set[RecordedValue] = field(default_factory=set)
    gathers: dict[nn.Module, frozenset[int]] = field(default_factory=dict)
    scatters: frozenset[nn.Module] = frozenset()

    @property
    def parameters(self) -> int:
        """How many parameters its layers have."""
        return sum(p.numel() for module in self.roles for p in module.parameters())


class Stuck(Exception):
    """An attempt failed; other segments for some layers may do."""

    def __init__(self, reason: str, segments: tuple[tuple[int, ...], ...], origins: frozenset[nn.Module]) -> None:
        super().__init__(reason)
        self.reason, self.segments, self.origins = reason, segments, origins


def outputs_of(module: nn.Module) -> int:
    """Number of output features or channels of a linear layer or a convolution."""
    layer: Any = module
    return int(layer.out_features if type(module) is nn.Linear else layer.out_channels)


def inputs_of(module: nn.Module) -> int:
    """Number of its input features or channels."""
    layer: Any = module
    return int(layer.in_features if type(module) is nn.Linear else layer.in_channels)


class RegionSearch:
    """Looks for regions in a recording.

    Args:
        recording: of the model.
        names: of the modules.
        free: layers that may be cut.
        ranks: over how many.
    """

    def __init__(self, recording: Recording, names: dict[nn.Module, str], free: set[nn.Module], ranks: int) -> None:
        self.recording = recording
        self.names = names
        self._free = free
        self.ranks = ranks

    def may_make_parts(self, module: nn.Module | None) -> bool:
        """Whether a layer may be the beginning of a region."""
        if module is None or module not in self._free or type(module) not in CHANNEL:
            return False
        return getattr(module, "groups", 1) == 1 and outputs_of(module) % self.ranks == 0

    def from_layer(self, module: nn.Module) -> Region:
        """The region that begins with a layer.

        Raises:
            CannotShard: there is none; says why.
        """
        waiting: list[dict[nn.Module, tuple[int, ...]]] = [{module: (outputs_of(module),)}]
        tried: list[Any] = []
        reason = "no way to cut it was found"
        for _ in range(_ATTEMPTS):
            if not waiting:
                break
            seeds = waiting.pop(0)
            if seeds in tried:
                continue
            tried.append(seeds)
            try:
                return self._attempt(seeds)
            except Stuck as stuck:
                reason = stuck.reason
                for segments in stuck.segments:
                    fitting = [m for m in seeds if m in stuck.origins and outputs_of(m) == sum(segments)]
                    if fitting and Shard.even(0, segments, self.ranks).equal:
                        waiting.append({**seeds, **dict.fromkeys(fitting, segments)})
            except NeedsShard as more:
                try:
                    for other in self._makers(more.operand.tensor):
                        seeds = {**seeds, other: seeds.get(other, (outputs_of(other),))}
                    waiting.insert(0, seeds)
                except CannotShard as error:
                    reason = error.reason
        raise CannotShard(reason)

    def _makers(self, value: RecordedValue) -> list[nn.Module]:
        """The layers that made a tensor, so that it can be made in parts."""
        found: dict[nn.Module, None] = {}
        waiting, seen = [value], set()
        while waiting:
            at = waiting.pop()
            if at in seen or not at.grad:
                continue
            seen.add(at)
            if at.producer is None:
                raise CannotShard(f"parts meet {at.name or 'an input of the model'}, which no layer makes")
            module = at.producer.module
            if self.may_make_parts(module):
                assert module is not None
                found[module] = None
            elif module is not None and type(module) not in (*_BATCH_NORMS, *DROPOUTS):
                raise CannotShard(f"parts meet what {self.names[module]} makes, which is whole")
            else:
                waiting += at.producer.inputs
        return list(found)

    def _attempt(self, seeds: dict[nn.Module, tuple[int, ...]]) -> Region:
        region = Region({})
        states: dict[RecordedValue, Shard] = {}
        origins: dict[RecordedValue, frozenset[nn.Module]] = {}
        whole_uses: set[nn.Module] = set()
        for call in self.recording.calls:
            mine = [v for v in call.inputs if v in states]
            source = frozenset[nn.Module]().union(*(origins[v] for v in mine))
            if call.module in seeds:
                module = call.module
                if mine:
                    raise Stuck(f"{self.names[module]} is given parts and would make parts", (), source)
                made = Shard.even(len(call.outputs[0].shape) + CHANNEL[type(module)], seeds[module], self.ranks)
                self.assign(region, module, Role("column", made))
                states[call.outputs[0]], origins[call.outputs[0]] = made, frozenset([module])
                continue
            if not mine:
                if call.module is not None:
                    whole_uses.add(call.module)
                continue
            region.calls.append(call.index)
            try:
                if call.module is not None:
                    splits = self._layer(region, call, states)
                else:
                    splits = self.function(region, call, states)
            except CannotShard as error:
                raise Stuck(f"in {call.path[-1] or 'the model'}: {error.reason}", error.segments, source) from None
            for value, split in zip(call.outputs, splits, strict=True):
                if split is not None:
                    if not split.equal:
                        raise Stuck(f"{call.name} leaves parts of {list(split.segments)}", (), source)
                    states[value], origins[value] = split, source
        for value in self.recording.outputs:
            if value in states:
                raise Stuck("the model returns what would be parts", (), origins[value])
        for module in region.roles:
            if module in whole_uses:
                raise Stuck(f"{self.names[module]} is used on whole tensors too", (), frozenset())
        if not any(role.kind == "row" for role in region.roles.values()):
            raise Stuck("no layer uses up the parts", (), frozenset())
        region.names = [self.names[m] for m in region.roles]
        region.parts = set(states)
        return region

    def assign(self, region: Region, module: nn.Module, role: Role) -> None:
        known = region.roles.setdefault(module, role)
        alike = role.kind in ("summed", "dropout") or known.split.segments == role.split.segments
        if known.kind != role.kind or not alike:
            raise Stuck(f"{self.names[module]} is used in two ways", (), frozenset())

    def _layer(self, region: Region, call: Call, states: dict[RecordedValue, Shard]) -> list[Shard | None]:
        module: Any = call.module
        name, kind = self.names[module], type(module)
        given = call.args[0] if call.args else None
        if not isinstance(given, RecordedValue) or given not in states or len(call.inputs) > 1:
            raise CannotShard(f"{name} is given parts in another place than its first argument")
        split, rank = states[given], len(given.shape)
        if kind in DROPOUTS:
            if kind in (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
                raise CannotShard(f"{name} drops whole channels, of which every rank has a part")
            self.assign(region, module, Role("dropout", split))
            return [split]
        if kind in (nn.LayerNorm, nn.RMSNorm):
            if split.dim >= rank - len(module.normalized_shape):
                raise CannotShard(f"{name} normalises over the features that are cut")
            self.assign(region, module, Role("summed", split))
            nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
            region.extras.append((nbytes, call.index, False))
            return [split]
        if module not in self._free:
            raise CannotShard(f"{name} is given parts, and cannot be cut")
        if kind in CHANNEL and split.dim == rank + CHANNEL[kind]:
            if getattr(module, "groups", 1) == 1:
                self.assign(region, module, Role("row", split))
                return [None]
            return [self._grouped(region, call, split)]
        channels = split.dim == 1 and rank > 1
        if kind in _BATCH_NORMS and channels:
            self.assign(region, module, Role("channels", split))
            return [split]
        if kind is nn.GroupNorm and channels and len(split.segments) == 1 and module.num_groups % self.ranks == 0:
            self.assign(region, module, Role("channels", split))
            return [split]
        if kind is nn.PReLU and channels and module.num_parameters == split.size:
            self.assign(region, module, Role("channels", split))
            return [split]
        raise CannotShard(f"{name} ({kind.__name__}) cannot work on parts along dim {split.dim}")

    def _grouped(self, region: Region, call: Call, split: Shard) -> Shard:
        module: Any = call.module
        if isinstance(module, TRANSPOSED) or len(split.segments) > 1 or module.groups % self.ranks:
            raise CannotShard(
                f"{self.names[module]} has {module.groups} groups of channels, which cannot be shared out"
            )
        self.assign(region, module, Role("channels", split))
        return Shard.even(split.dim, module.out_channels, self.ranks)

    def function(self, region: Region, call: Call, states: dict[RecordedValue, Shard]) -> list[Shard | None]:
        if call.name in LAYERS:
            raise CannotShard(f"{call.name} is given shards outside of a layer")

        def operand(leaf: Any) -> Any:
            if not isinstance(leaf, RecordedValue):
                return leaf
            return Operand(leaf.shape, states.get(leaf), leaf.grad, leaf.producer is not None, leaf.dtype, leaf)

        site = OperatorCall(
            call.name,
            mapped(operand, call.args),
            mapped(operand, call.kwargs),
            self.ranks,
            func=call.func,
            in_place=changes_first(call.func, call.kwargs),
        )
        outcome = apply_rule(site)
        for leaf in leaves((site.args, site.kwargs)):
            whole = leaf.operand if isinstance(leaf, LocalShard) else leaf
            if isinstance(whole, Operand) and whole.shard is None and whole.grad:
                region.extras.append((whole.tensor.nbytes, call.index, not whole.tensor.name))
        if site.answer is not NO_ANSWER:
            return [None] * len(call.outputs)
        return list(placements_of(outcome, len(call.outputs)))
