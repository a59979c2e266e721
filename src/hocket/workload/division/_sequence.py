"""Sequence parallelism: what lies between cut layers (norms, dropout, residual sums) works on parts of the sequence.

Where a row layer would add up over the ranks, for all of them to go on with the same tensor, it leaves each a part of
the positions (reduce_scatter); the next column layers gather them (all_gather). Both together move what the all_reduce
moved.
Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hocket.sharding import CannotShard, NeedsShard, Shard

from ._record import DROPOUTS, Call, RecordedValue, Recording
from ._region_search import RegionSearch, Stuck
from ._regions import Region

SEQUENCE = -2
"""The dim that sequence parallelism cuts, from the end: positions, or samples where those come second."""


def sequences(
    model: nn.Module, recording: Recording, regions: list[Region], ranks: int
) -> tuple[list[Region], dict[str, str]]:
    """Return stretches of the model that can work on parts of the sequence, given what is cut.

    Returns:
        The stretches, and why others cannot, by the name of the layer with which they begin.
    """
    names = {module: name for name, module in model.named_modules()}
    search = _SequenceSearch(recording, names, regions, ranks)
    found: list[Region] = []
    refused: dict[str, str] = {}
    for call in recording.calls:
        module = call.module
        if module is None or any(module in zone.scatters for zone in found) or not search.may_begin(call):
            continue
        try:
            found.append(search.stretch(module))
        except CannotShard as error:
            refused[f"sequence after {names[module]}"] = error.reason
    return found, refused


class _NeedsMore(Exception):
    """A layer works on parts of the sequence and on a whole one, which should be cut too."""

    def __init__(self, value: RecordedValue) -> None:
        super().__init__()
        self.value = value


class _SequenceSearch(RegionSearch):
    """Follows parts of the sequence from the layers that could make them to those that can gather them."""

    def __init__(self, recording: Recording, names: dict[nn.Module, str], regions: list[Region], ranks: int) -> None:
        super().__init__(recording, names, set(), ranks)
        self._roles = {m: role for region in regions for m, role in region.roles.items()}
        self._parts = {value for region in regions for value in region.parts}

    def may_begin(self, call: Call) -> bool:
        """Return whether a call adds up over the ranks what could stay in parts."""
        return self.may_scatter(call) and self._roles[call.module].kind in ("row", "heads")  # type: ignore[index]

    def may_scatter(self, call: Call) -> bool:
        """Return whether a call's output is the same on all ranks and could be cut along the sequence."""
        if call.module is None:
            return False
        role = self._roles.get(call.module)
        if role is None or not (role.kind in ("row", "heads", "vocabulary") or (role.kind == "column" and role.whole)):
            return False
        shape = call.outputs[0].shape
        tokens = isinstance(call.module, nn.Linear | nn.Embedding | nn.MultiheadAttention)
        return tokens and len(shape) >= 2 and shape[SEQUENCE] % self.ranks == 0

    def stretch(self, module: nn.Module) -> Region:
        """Return the stretch that begins with a layer, and all that it needs; CannotShard says why there is none."""
        makers = {module}
        while True:
            try:
                return self._follow(makers)
            except _NeedsMore as more:
                makers |= self._sources(more.value)
            except NeedsShard as more:
                makers |= self._sources(more.operand.tensor)
            except Stuck as stuck:
                raise CannotShard(stuck.reason) from None

    def _sources(self, value: RecordedValue) -> set[nn.Module]:
        found: set[nn.Module] = set()
        waiting, seen = [value], set()
        while waiting:
            at = waiting.pop()
            if at in seen or not at.grad:
                continue
            seen.add(at)
            call = at.producer
            if call is None:
                raise CannotShard(f"parts of the sequence meet {at.name or 'an input of the model'}")
            if self.may_scatter(call):
                assert call.module is not None
                found.add(call.module)
            elif call.module is not None and type(call.module) not in (nn.LayerNorm, nn.RMSNorm, *DROPOUTS):
                raise CannotShard(f"parts of the sequence meet what {self.names[call.module]} makes")
            else:
                waiting += call.inputs
        return found

    def _follow(self, makers: set[nn.Module]) -> Region:
        zone = Region({}, reason="works on parts of the sequence")
        states: dict[RecordedValue, Shard] = {}
        gathers: dict[nn.Module, set[int]] = {}
        whole_uses: set[tuple[nn.Module, int]] = set()
        for call in self.recording.calls:
            module = call.module
            mine = [v for v in call.inputs if v in states]
            role = self._roles.get(module) if module is not None else None
            if module is not None and role is not None and role.kind in ("column", "heads"):
                for place, value in enumerate(call.inputs[: 3 if role.kind == "heads" else 1]):
                    if value not in states:
                        whole_uses.add((module, place))
                        continue
                    if states[value].dim != len(value.shape) + SEQUENCE:
                        raise Stuck(f"{self.names[module]} is given the sequence in another dim", (), frozenset())
                    gathers.setdefault(module, set()).add(place)
            elif mine:
                zone.calls.append(call.index)
                try:
                    splits = (
                        self._layer(zone, call, states) if module is not None else self.function(zone, call, states)
                    )
                except CannotShard as error:
                    raise Stuck(f"in {call.path[-1] or 'the model'}: {error.reason}", (), frozenset()) from None
                states.update({v: s for v, s in zip(call.outputs, splits, strict=True) if s is not None})
            if module in makers:
                if not self.may_scatter(call):
                    raise Stuck(f"{self.names[module]} makes what cannot be cut", (), frozenset())
                out = call.outputs[0]
                states[out] = Shard.even(len(out.shape) + SEQUENCE, out.shape[SEQUENCE], self.ranks)
        if any(value in states for value in self.recording.outputs):
            raise Stuck("the model returns what would be parts of the sequence", (), frozenset())
        for module, places in gathers.items():
            if any((module, place) in whole_uses for place in places):
                raise Stuck(f"{self.names[module]} is used on whole sequences too", (), frozenset())
        for call in self.recording.calls:
            if call.module in zone.roles and call.inputs[0] not in states:
                raise _NeedsMore(call.inputs[0])
        zone.gathers = {module: frozenset(places) for module, places in gathers.items()}
        zone.scatters = frozenset(makers)
        zone.names = [self.names[m] for m in zone.roles]
        zone.parts = set(states)
        return zone

    def function(self, region: Region, call: Call, states: dict[RecordedValue, Shard], *_: Any) -> list[Shard | None]:
        """Do as for any region; a function that works on parts of something else is given whole sequences."""
        if any(value in self._parts for value in call.inputs):
            raise CannotShard(f"{call.name} would be given parts of the sequence")
        return super().function(region, call, states)

    def _layer(self, region: Region, call: Call, states: dict[RecordedValue, Shard]) -> list[Shard | None]:
        if call.module in self._roles:
            raise CannotShard(f"{self.names[call.module]} would be given parts of the sequence")
        return super()._layer(region, call, states)
