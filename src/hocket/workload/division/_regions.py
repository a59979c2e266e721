"""Finds what can be cut together: layers that make parts, layers that use them up, and what lies between.

A layer that makes parts of its outputs (column) is followed through the recorded calls, by the rules of
`hocket.sharding`, until every part has been used up by layers that add up over parts of their inputs (row). Where
parts meet a tensor that is whole, the layers that made that one are cut as well; where a dim turns out to be
several side by side (queries, keys and values of one matrix), it is cut in so many segments. Whatever else happens
to a part ends the attempt, with a reason.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
TABLES = (nn.Embedding, nn.EmbeddingBag)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_ATTEMPTS = 24
_WAYS = 4
LAYERS = frozenset(
    ["linear", "batch_norm", "group_norm", "layer_norm", "rms_norm", "prelu", "embedding"]
    + [f"conv{transposed}{n}d" for transposed in ("", "_transpose") for n in (1, 2, 3)]
)
"""What layers with weights call for themselves: there the weights are shards already."""
PRODUCTS = frozenset(
    [
        "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "grouped_mm", "embedding", "conv1d", "conv2d",
        "conv3d",
    ]
)  # fmt: skip
"""Operators of which a weight may be divided by itself."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a layer is in a region."""

    # "column", "row", "hidden" (a part of a recurrent layer's hidden units), "channels" (a layer that works channel by
    # channel, with parts of its parameters), "summed" (parameters whole, gradients added up), "dropout", "vocabulary",
    # "heads"
    kind: str
    split: Shard  # of its output (column), of its input (others); along the features or channels
    whole: bool = False  # whether the cut side is whole to others


@dataclass(frozen=True, slots=True)
class CutParameter:
    """A parameter that functions use as it is, outside of any layer that is known."""

    parameter: nn.Parameter  # the whole one
    shard: Shard  # how it is divided
    alone: bool = False  # whether the first results that other tensors went into are gathered, or stay divided


class Exchanged(NamedTuple):
    """One operation."""

    phase: str  # "forward" or "backward"
    kind: str  # "all_reduce", "all_gather" or "reduce_scatter"
    nbytes: int  # of its full tensor
    call: int  # in the recording, which makes it necessary
    with_batch: bool = True  # whether it grows with the batch; the gradients of parameters do not


@dataclass(slots=True)
class Region:
    """Layers that are cut together or not at all."""

    roles: dict[nn.Module, Role]  # by layer
    # of the layers, in the order of their first call, and of these parameters
    names: list[str] = field(default_factory=list)
    # operations beside those of the layers: for gradients of tensors between them, for sums and results of parameters
    # that are cut by themselves
    extras: list[Exchanged] = field(default_factory=list)
    reason: str = ""  # why the region is cut as it is
    calls: list[int] = field(default_factory=list)  # places in the recording of what happens on parts
    parts: set[RecordedValue] = field(default_factory=set)  # the values of which every rank has a part
    # layers of other regions whose inputs in those places are parts of the sequence
    gathers: dict[nn.Module, frozenset[int]] = field(default_factory=dict)
    # layers of other regions whose outputs are to be parts of the sequence
    scatters: frozenset[nn.Module] = frozenset()
    # parameters that are cut beside those of layers, by name
    tensors: dict[str, CutParameter] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """How many parameters its layers have."""
        layers = sum(p.numel() for module in self.roles for p in module.parameters())
        return layers + sum(one.parameter.numel() for one in self.tensors.values())

    @property
    def weights(self) -> int:
        """How many matrices make parts or use them up."""
        layers = sum(role.kind in ("column", "row") for role in self.roles.values())
        return layers + sum(one.parameter.ndim > 1 for one in self.tensors.values())

    @property
    def members(self) -> list[nn.Module | nn.Parameter]:
        """Layers and parameters that no other region can have."""
        return [*self.roles, *(one.parameter for one in self.tensors.values())]


Source = nn.Module | str
"""Where parts come from: a layer, or a parameter by its name."""
Seeds = dict[Source, Shard]
"""How sources are divided: layers along a dim of their outputs that is told by the call."""


@dataclass(slots=True)
class _Ruling:
    """How a function's results lie, and those of them that are made of divided parameters alone."""

    splits: list[Shard | None]
    weights: list[RecordedValue] = field(default_factory=list)


class Stuck(Exception):
    """An attempt failed; other segments for some layers may do."""

    def __init__(self, reason: str, segments: tuple[tuple[int, ...], ...], origins: frozenset[Source]) -> None:
        super().__init__(reason)
        self.reason, self.segments, self.origins = reason, segments, origins


def outputs_of(module: nn.Module) -> int:
    """Return the number of output features or channels of a linear layer or a convolution."""
    layer: Any = module
    return int(layer.out_features if type(module) is nn.Linear else layer.out_channels)


def inputs_of(module: nn.Module) -> int:
    """Return the number of its input features or channels."""
    layer: Any = module
    return int(layer.in_features if type(module) is nn.Linear else layer.in_channels)


class RegionSearch:
    """Looks for regions in a recording: `free` layers may be cut over the ranks, and `loose` parameters, by name."""

    def __init__(
        self,
        recording: Recording,
        names: dict[nn.Module, str],
        free: set[nn.Module],
        ranks: int,
        loose: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.recording = recording
        self.names = names
        self._free = free
        self.ranks = ranks
        self._loose = loose or {}
        self._of: dict[str, RecordedValue] = {}  # parameters, as the recording has them
        self._derived: set[RecordedValue] = set()  # what is made of them alone
        self._uses: dict[RecordedValue | nn.Module, list[int]] = {}
        self._ruled: dict[Any, tuple[_Ruling | CannotShard | NeedsShard, list[Exchanged]]] = {}  # by call and operands
        self._equal: dict[tuple[tuple[int, ...], ...], bool] = {}  # whether shards with such bounds are
        for call in recording.calls:
            users: list[RecordedValue | nn.Module] = [*call.inputs, *([] if call.module is None else [call.module])]
            for user in dict.fromkeys(users):
                self._uses.setdefault(user, []).append(call.index)
                if isinstance(user, RecordedValue) and user.name in self._loose:
                    self._of[user.name] = user
            numbers = [v for v in call.inputs if v.dtype.is_floating_point]
            if call.module is None and numbers and all(v.name in self._loose or v in self._derived for v in numbers):
                self._derived.update(call.outputs)

    def may_make_parts(self, module: nn.Module | None) -> bool:
        """Return whether a layer may be the beginning of a region."""
        if module is None or module not in self._free or type(module) not in CHANNEL:
            return False
        return getattr(module, "groups", 1) == 1 and outputs_of(module) % self.ranks == 0

    def from_layer(self, module: nn.Module) -> Region:
        """Return the region that begins with a layer; CannotShard says why there is none."""
        return self._from([{module: Shard.even(0, outputs_of(module), self.ranks)}])

    def from_parameter(self, name: str, alone: bool = False) -> Region:
        """Return the region that begins with a parameter; where it is to be alone, what is made with it is gathered.

        CannotShard says why there is none.
        """
        if name not in self._of:
            raise CannotShard("the sample did not get there")
        found: list[Region] = []
        reasons = [f"no dim can be shared out over {self.ranks} ranks"]
        for shard in self._shards(name):
            try:
                region = self._from([{name: shard}], alone)
            except CannotShard as error:
                reasons.append(error.reason)
                continue
            if not alone and region.weights < 2:
                reasons.append("no layer goes with it")
            else:
                found.append(region)
        if not found:
            raise CannotShard(reasons[-1])
        return max(found, key=lambda one: (one.weights, -sum(e.nbytes for e in one.extras)))

    def _shards(self, name: str, wanted: Shard | None = None) -> list[Shard]:
        """Return how a parameter may be divided, the likeliest first: as what is made of it is to be."""
        shape = self._of[name].shape
        dims = [dim for dim, size in enumerate(shape) if size % self.ranks == 0 and size]
        if wanted is not None and (alike := [dim for dim in dims if shape[dim] == wanted.size]):
            return [wanted.at(dim) for dim in sorted(alike, key=lambda dim: dim != wanted.dim)]
        return [Shard.even(dim, shape[dim], self.ranks) for dim in dims]

    def _from(self, waiting: list[Seeds], alone: bool = False) -> Region:
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
                return self._attempt(seeds, alone)
            except Stuck as stuck:
                reason = stuck.reason
                for segments in stuck.segments:
                    fitting = [m for m in seeds if m in stuck.origins and seeds[m].size == sum(segments)]
                    if fitting and Shard.even(0, segments, self.ranks).equal:
                        others = {m: Shard.even(seeds[m].dim, segments, self.ranks) for m in fitting}
                        waiting.append({**seeds, **others})
            except NeedsShard as more:
                try:
                    waiting[:0] = [{**others, **seeds} for others in self._makers(more.operand.tensor, more.shard)]
                except CannotShard as error:
                    reason = error.reason
        raise CannotShard(reason)

    def _makers(self, value: RecordedValue, wanted: Shard) -> list[Seeds]:
        """Return what made a tensor, for it to be made in parts; several ways, where it can be divided in several."""
        found: Seeds = {}
        ways: list[Seeds] = [found]
        waiting, seen = [value], set()
        while waiting:
            at = waiting.pop()
            if at in seen:
                continue
            seen.add(at)
            if at.name in self._loose:
                exact = [wanted] if at is value else self._shards(at.name, wanted)
                ways = [{**way, at.name: shard} for way in ways for shard in exact][:_WAYS]
                continue
            if not at.grad and at not in self._derived:
                continue
            if at.producer is None:
                raise CannotShard(f"parts meet {at.name or 'an input of the model'}, which no layer makes")
            module = at.producer.module
            if self.may_make_parts(module):
                assert module is not None
                made = Shard.even(0, outputs_of(module), self.ranks)
                ways = [{**way, module: made} for way in ways]
            elif module is not None and type(module) not in (*_BATCH_NORMS, *DROPOUTS):
                raise CannotShard(f"parts meet what {self.names[module]} makes, which is whole")
            else:
                weights = [v for v in at.producer.inputs if v.name in self._loose or v in self._derived]
                # The weight of a product decides what is made; what else goes with it follows.
                product = at.producer.name in PRODUCTS and [v for v in weights if len(v.shape) > 1]
                waiting += product or at.producer.inputs
        return [way for way in ways if way]

    def _attempt(self, seeds: Seeds, alone: bool) -> Region:
        region = Region({})
        states: dict[RecordedValue, Shard] = {}
        origins: dict[RecordedValue, frozenset[Source]] = {}
        weights: set[RecordedValue] = set()
        visits = [index for source in seeds if not isinstance(source, str) for index in self._uses[source]]
        for name in seeds:
            if isinstance(name, str):
                value = self._of[name]
                region.tensors[name] = CutParameter(self._loose[name], seeds[name], alone)
                states[value], origins[value] = seeds[name], frozenset([name])
                weights.add(value)
                visits += self._uses[value]
        visits = sorted(set(visits))
        visited: set[int] = set()
        while visits:
            index = heapq.heappop(visits)
            if index in visited:
                continue
            visited.add(index)
            call = self.recording.calls[index]
            mine = [v for v in call.inputs if v in states]
            source = frozenset[Source]().union(*(origins[v] for v in mine))
            if call.module in seeds:
                module = call.module
                if mine:
                    raise Stuck(f"{self.names[module]} is given parts and would make parts", (), source)
                made = seeds[module].at(len(call.outputs[0].shape) + CHANNEL[type(module)])
                self.assign(region, module, Role("column", made))
                splits: list[Shard | None] = [made]
                source = frozenset[Source]([module])
            else:
                region.calls.append(call.index)
                try:
                    if call.module is not None:
                        splits = self._layer(region, call, states)
                    else:
                        splits = self.function(region, call, states, weights, alone)
                except CannotShard as error:
                    raise Stuck(f"in {call.path[-1] or 'the model'}: {error.reason}", error.segments, source) from None
            for value, split in zip(call.outputs, splits, strict=True):
                if split is not None:
                    if split.bounds not in self._equal:
                        self._equal[split.bounds] = split.equal
                    if not self._equal[split.bounds]:
                        raise Stuck(f"{call.name} leaves parts of {list(split.segments)}", (), source)
                    states[value], origins[value] = split, source
                    for use in self._uses.get(value, ()):
                        heapq.heappush(visits, use)
        for value in self.recording.outputs:
            if value in states:
                raise Stuck("the model returns what would be parts", (), origins[value])
        for module in region.roles:
            if any(index not in visited for index in self._uses[module]):
                raise Stuck(f"{self.names[module]} is used on whole tensors too", (), frozenset())
        used_up = any(
            one.kind == ("all_gather" if alone else "all_reduce") for one in region.extras if one[0] == "forward"
        )
        if not used_up and not any(role.kind == "row" for role in region.roles.values()):
            raise Stuck("no layer uses up the parts", (), frozenset())
        region.names = [*(self.names[m] for m in region.roles), *region.tensors]
        region.parts = set(states)
        region.calls.sort()
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
            region.extras.append(Exchanged("backward", "all_reduce", nbytes, call.index, False))
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

    def function(
        self,
        region: Region,
        call: Call,
        states: dict[RecordedValue, Shard],
        weights: set[RecordedValue] | None = None,
        alone: bool = False,
    ) -> list[Shard | None]:
        """Return how a function's results lie; `weights` are divided parameters, and what is made of such alone."""
        weights = set() if weights is None else weights
        # Many attempts come by: in a chain of residual blocks each layer's attempt goes through the whole chain.
        key = (call.index, alone, *((states.get(value), value in weights) for value in call.inputs))
        if key not in self._ruled:
            extras: list[Exchanged] = []
            try:
                self._ruled[key] = self._rule(extras, call, states, weights, alone), extras
            except (CannotShard, NeedsShard) as error:
                self._ruled[key] = error, extras
        ruling, extras = self._ruled[key]
        region.extras += extras
        if isinstance(ruling, Exception):
            raise ruling.with_traceback(None)
        weights.update(ruling.weights)
        return list(ruling.splits)

    def _rule(
        self,
        extras: list[Exchanged],
        call: Call,
        states: dict[RecordedValue, Shard],
        weights: set[RecordedValue],
        alone: bool,
    ) -> _Ruling:
        if call.name in LAYERS and call.name not in PRODUCTS:
            raise CannotShard(f"{call.name} is given shards outside of a layer")

        def operand(leaf: Any) -> Any:
            if not isinstance(leaf, RecordedValue):
                return leaf
            weight = ("alone" if alone else "parts") if leaf in weights else ""
            made = leaf.name in self._loose or leaf in self._derived or (leaf.producer is not None and not alone)
            better = made and (leaf.grad or leaf.name in self._loose or leaf in self._derived)
            return Operand(leaf.shape, states.get(leaf), leaf.grad, better, leaf.dtype, leaf, weight)

        site = OperatorCall(
            call.name,
            mapped(operand, call.args),
            mapped(operand, call.kwargs),
            self.ranks,
            func=call.func,
            in_place=changes_first(call.func, call.kwargs),
        )
        weight = site.weight
        uses = any(one.weight for one in site.operands())
        outcome = apply_rule(site)
        if call.name in LAYERS and not uses:
            raise CannotShard(f"{call.name} is given shards outside of a layer")
        for leaf in leaves((site.args, site.kwargs)):
            whole = leaf.operand if isinstance(leaf, LocalShard) else leaf
            if isinstance(whole, Operand) and whole.shard is None and whole.grad:
                value: RecordedValue = whole.tensor
                extras.append(Exchanged("backward", "all_reduce", value.nbytes, call.index, not value.name))
        if site.answer is not NO_ANSWER:
            return _Ruling([None] * len(call.outputs))
        found = list(placements_of(outcome, len(call.outputs)))
        if site.summed:
            extras += [Exchanged("forward", "all_reduce", out.nbytes, call.index) for out in call.outputs]
        made = [v for v, split in zip(call.outputs, found, strict=True) if split is not None]
        if weight:
            return _Ruling(found, made)
        if uses and alone:
            extras += [Exchanged("forward", "all_gather", out.nbytes, call.index) for out in made]
            found = [None] * len(found)
        return _Ruling(found)
