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
from ._regions import CHANNEL, LAYERS, PRODUCTS, TRANSPOSED, CutParameter, Exchanged, Region, Role, outputs_of

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_ATTEMPTS = 24
_WAYS = 4
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
