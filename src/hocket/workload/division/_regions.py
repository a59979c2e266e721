"""Finds what can be cut together: layers that make parts, layers that use them up, and what lies between.

A layer that makes parts of its outputs (column) is followed through the recorded calls, by the rules of `_rules`,
until every part has been used up by layers that add up over parts of their inputs (row). Where parts meet a tensor
that is whole, the layers that made that one are cut as well; where a dim turns out to be several side by side
(queries, keys and values of one matrix), it is cut in so many segments. Whatever else happens to a part ends the
attempt, with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ._call import NO_ANSWER, NeedsSplit, Operand, Part, Site
from ._homes import homes
from ._record import DROPOUTS, Call, Recording, Value, leaves, mapped
from ._shape_rules import ALL_RULES
from ._split import CannotSplit, Split

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
    split: Split
    whole: bool = False


@dataclass(slots=True)
class Region:
    """Layers that are cut together or not at all.

    Attributes:
        roles: by layer.
        names: of the layers, in the order of their first call.
        aware: why some forward must be interpreted; empty where it comes out right by itself.
        homes: modules whose forward must be interpreted, by name; for each which of its arguments (counted through all,
            nested ones too) are parts, and how they are cut.
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
    aware: str = ""
    homes: dict[str, dict[int, Split]] = field(default_factory=dict)
    extras: list[tuple[int, int, bool]] = field(default_factory=list)
    reason: str = ""
    calls: list[int] = field(default_factory=list)
    parts: set[Value] = field(default_factory=set)
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


class Search:
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
            CannotSplit: there is none; says why.
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
                    if fitting and Split(0, segments).divides(self.ranks):
                        waiting.append({**seeds, **dict.fromkeys(fitting, segments)})
            except NeedsSplit as more:
                try:
                    for other in self._makers(more.operand.tensor):
                        seeds = {**seeds, other: seeds.get(other, (outputs_of(other),))}
                    waiting.insert(0, seeds)
                except CannotSplit as error:
                    reason = error.reason
        raise CannotSplit(reason)

    def _makers(self, value: Value) -> list[nn.Module]:
        """The layers that made a tensor, so that it can be made in parts."""
        found: dict[nn.Module, None] = {}
        waiting, seen = [value], set()
        while waiting:
            at = waiting.pop()
            if at in seen or not at.grad:
                continue
            seen.add(at)
            if at.producer is None:
                raise CannotSplit(f"parts meet {at.name or 'an input of the model'}, which no layer makes")
            module = at.producer.module
            if self.may_make_parts(module):
                assert module is not None
                found[module] = None
            elif module is not None and type(module) not in (*_BATCH_NORMS, *DROPOUTS):
                raise CannotSplit(f"parts meet what {self.names[module]} makes, which is whole")
            else:
                waiting += at.producer.inputs
        return list(found)

    def _attempt(self, seeds: dict[nn.Module, tuple[int, ...]]) -> Region:
        region = Region({})
        states: dict[Value, Split] = {}
        origins: dict[Value, frozenset[nn.Module]] = {}
        paths: list[tuple[str, ...]] = []
        whole_uses: set[nn.Module] = set()
        for call in self.recording.calls:
            mine = [v for v in call.inputs if v in states]
            source = frozenset[nn.Module]().union(*(origins[v] for v in mine))
            if call.module in seeds:
                module = call.module
                if mine:
                    raise Stuck(f"{self.names[module]} is given parts and would make parts", (), source)
                made = Split(len(call.outputs[0].shape) + CHANNEL[type(module)], seeds[module])
                self.assign(region, module, Role("column", made))
                states[call.outputs[0]], origins[call.outputs[0]] = made, frozenset([module])
                paths.append(call.path)
                continue
            if not mine:
                if call.module is not None:
                    whole_uses.add(call.module)
                continue
            region.calls.append(call.index)
            paths.append(call.path)
            try:
                if call.module is not None:
                    splits = self._layer(region, call, states)
                else:
                    splits = self.function(region, call, states)
            except CannotSplit as error:
                raise Stuck(f"in {call.path[-1] or 'the model'}: {error.reason}", error.segments, source) from None
            for value, split in zip(call.outputs, splits, strict=True):
                if split is not None:
                    if not split.divides(self.ranks):
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
        region.homes = homes(self.recording, region.homes, states, paths)
        return region

    def assign(self, region: Region, module: nn.Module, role: Role) -> None:
        known = region.roles.setdefault(module, role)
        alike = role.kind in ("summed", "dropout") or known.split.segments == role.split.segments
        if known.kind != role.kind or not alike:
            raise Stuck(f"{self.names[module]} is used in two ways", (), frozenset())

    def _layer(self, region: Region, call: Call, states: dict[Value, Split]) -> list[Split | None]:
        module: Any = call.module
        name, kind = self.names[module], type(module)
        given = call.args[0] if call.args else None
        if not isinstance(given, Value) or given not in states or len(call.inputs) > 1:
            raise CannotSplit(f"{name} is given parts in another place than its first argument")
        split, rank = states[given], len(given.shape)
        if kind in DROPOUTS:
            if kind in (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
                raise CannotSplit(f"{name} drops whole channels, of which every rank has a part")
            self.assign(region, module, Role("dropout", split))
            return [split]
        if kind in (nn.LayerNorm, nn.RMSNorm):
            if split.dim >= rank - len(module.normalized_shape):
                raise CannotSplit(f"{name} normalises over the features that are cut")
            self.assign(region, module, Role("summed", split))
            nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
            region.extras.append((nbytes, call.index, False))
            return [split]
        if module not in self._free:
            raise CannotSplit(f"{name} is given parts, and cannot be cut")
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
        raise CannotSplit(f"{name} ({kind.__name__}) cannot work on parts along dim {split.dim}")

    def _grouped(self, region: Region, call: Call, split: Split) -> Split:
        module: Any = call.module
        if isinstance(module, TRANSPOSED) or len(split.segments) > 1 or module.groups % self.ranks:
            raise CannotSplit(
                f"{self.names[module]} has {module.groups} groups of channels, which cannot be shared out"
            )
        self.assign(region, module, Role("channels", split))
        return Split(split.dim, (module.out_channels,))

    def function(self, region: Region, call: Call, states: dict[Value, Split]) -> list[Split | None]:
        rule = ALL_RULES.get(call.name)
        if rule is None:
            raise CannotSplit(f"{call.name} is not known to work on parts")

        def operand(leaf: Any) -> Any:
            if not isinstance(leaf, Value):
                return leaf
            return Operand(leaf.shape, states.get(leaf), leaf.grad, leaf.producer is not None, leaf)

        site = Site(call.name, list(mapped(operand, call.args)), mapped(operand, call.kwargs), self.ranks)
        splits = rule(site)
        for leaf in leaves((site.args, site.kwargs)):
            whole = leaf.operand if isinstance(leaf, Part) else leaf
            if isinstance(whole, Operand) and whole.split is None and whole.grad:
                site.aware = True
                region.extras.append((whole.tensor.nbytes, call.index, not whole.tensor.name))
        if site.aware:
            region.homes.setdefault(call.path[-1], {})
            region.aware = region.aware or f"{call.name} in {call.path[-1] or 'the model'}"
        if site.answer is not NO_ANSWER:
            return [None] * len(call.outputs)
        if splits is None or isinstance(splits, Split):
            return [splits] * len(call.outputs)
        return list(splits)
