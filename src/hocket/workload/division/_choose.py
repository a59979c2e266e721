"""Chooses what to cut of what can be cut, and how the rest is shared out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hocket.sharding import CannotShard, Shard

from ._record import RECURRENT, RecordedValue, Recording, is_layer
from ._region_search import RegionSearch
from ._regions import CHANNEL, TABLES, Region, Role, inputs_of, outputs_of


@dataclass(slots=True)
class RegionChoice:
    """What was chosen for a model."""

    regions: list[Region]  # to be cut
    refused: dict[str, str]  # why layers stay whole, by name


def choose(model: nn.Module, recording: Recording, ranks: int) -> RegionChoice:
    """Return regions that do not share layers, the largest first; then what is left, each layer by itself."""
    names = {module: name for name, module in model.named_modules()}
    free, tied, refused = _free(model, names, recording)
    loose = _loose(model)
    search = RegionSearch(recording, names, free, ranks, loose)
    unpaired: dict[nn.Module, str] = {}
    found: list[Region] = []
    used = {v for call in recording.calls for v in call.inputs} | set(recording.outputs)
    for module in names:
        if type(module) is nn.MultiheadAttention and module in free:
            try:
                found.append(_heads(module, names[module], recording, used, ranks))
            except CannotShard as error:
                refused[names[module]] = error.reason
        elif search.may_make_parts(module):
            try:
                found.append(search.from_layer(module))
            except CannotShard as error:
                unpaired[module] = error.reason
    reasons: dict[str, str] = {}
    for name in sorted((name for name, p in loose.items() if p.ndim > 1), key=lambda name: -loose[name].numel()):
        if not any(name in region.tensors for region in found):
            try:
                found.append(search.from_parameter(name))
            except CannotShard as error:
                reasons[name] = error.reason
    from ._disjoint import disjoint  # here, since networkx takes a while to load

    chosen = disjoint(found)
    taken = {module for region in chosen for module in region.roles}
    cut = {name for region in chosen for name in region.tensors}
    for name in (name for name, parameter in loose.items() if parameter.ndim > 1):
        if name not in cut:
            why = reasons.get(name, "its neighbours go together")
            try:
                region = search.from_parameter(name, alone=True)
            except CannotShard as error:
                refused[name] = error.reason if name not in reasons else f"{why}; by itself: {error.reason}"
                continue
            if not cut & region.tensors.keys() and not taken & region.roles.keys():
                region.reason = f"results are gathered: {why}"
                chosen.append(region)
                cut |= region.tensors.keys()
                taken |= region.roles.keys()
    for pair in tied:
        try:
            chosen.append(_tied(*pair, names, recording, ranks))
        except CannotShard as error:
            refused.update(dict.fromkeys((names[m] for m in pair), error.reason))
    for module in names:
        if module in free and module not in taken:
            try:
                if type(module) in RECURRENT:
                    alone: Region | None = _hidden(module, names[module], recording, ranks)
                else:
                    alone = _alone(module, names[module], unpaired.get(module, "its neighbours go together"), ranks)
            except CannotShard as error:
                refused[names[module]] = error.reason
            else:
                if alone is not None:
                    chosen.append(alone)
    for module, name in names.items():
        if any(f"{name}.{own}".lstrip(".") in cut for own in module._parameters):
            refused.pop(name, None)
    order = {name: i for i, name in enumerate([*names.values(), *loose])}
    chosen.sort(key=lambda r: order[r.names[0]])
    return RegionChoice(chosen, refused)


def apart(region: Region, why: str, ranks: int) -> list[Region]:
    """Return the layers of a region that turned out not to go together, each by itself, where it can be cut."""
    found = []
    for name, module in zip(region.names, region.roles, strict=False):
        if len(region.roles) > 1 and type(module) in CHANNEL:
            try:
                alone = _alone(module, name, why, ranks)
            except CannotShard:
                continue
            if alone is not None:
                found.append(alone)
    return found


def _free(
    model: nn.Module, names: dict[nn.Module, str], recording: Recording
) -> tuple[set[nn.Module], list[tuple[Any, nn.Module]], dict[str, str]]:
    """Return layers that may be cut; embeddings with the layer that has the same matrix; why others may not."""
    users: dict[int, list[nn.Module]] = {}
    for module in names:
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(module)
    inside = {m.out_proj for m in names if isinstance(m, nn.MultiheadAttention)}
    called = {call.module for call in recording.calls}
    direct = {v.name for call in recording.calls if call.module is None for v in call.inputs if v.name}
    free, refused = set(), {}
    tied: list[tuple[Any, nn.Module]] = []
    for module, name in names.items():
        parameters = dict(module.named_parameters(recurse=False))
        if not parameters or module in inside:
            continue
        shared = {id(user): user for p in parameters.values() for user in users[id(p)] if user is not module}
        if not is_layer(module):
            if all(p.ndim < 2 for p in parameters.values()):
                refused[name] = f"{type(module).__name__} has vectors of its own, which are cut with what they go with"
        elif "forward" in module.__dict__:
            refused[name] = "its forward was replaced"
        elif module not in called:
            refused[name] = "the sample did not get there"
        elif any(f"{name}.{p}" in direct for p in parameters):
            refused[name] = "its parameters are used outside of it"
        elif len(shared) == 1:
            other = next(iter(shared.values()))
            pair = (module, other) if type(module) is nn.Embedding else (other, module)
            kinds = type(pair[0]), type(pair[1])
            if kinds != (nn.Embedding, nn.Linear):
                refused[name] = f"its parameters are also those of {names[other]}"
            elif pair not in tied:
                tied.append(pair)
        elif shared:
            refused[name] = "its parameters are those of several other layers"
        else:
            free.add(module)
    return free, tied, refused


def _loose(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters that no known layer has, by name: those that a user's module works with as they are."""
    layers = {m for m in model.modules() if is_layer(m)}
    layers |= {m.out_proj for m in layers if isinstance(m, nn.MultiheadAttention)}
    held = {id(p) for m in layers for p in m.parameters(recurse=False)}
    return {n: p for n, p in model.named_parameters() if id(p) not in held and p.is_floating_point()}


def _heads(
    module: nn.MultiheadAttention, name: str, recording: Recording, used: set[RecordedValue], ranks: int
) -> Region:
    if module.num_heads % ranks:
        raise CannotShard(f"{module.num_heads} heads cannot be shared out over {ranks} ranks")
    if module.bias_k is not None or module.add_zero_attn:
        raise CannotShard("attention with a bias for keys, or with a row of zeros, has no form")
    weights_used = any(v in used for call in recording.calls if call.module is module for v in call.outputs[1:])
    reason = "projections by heads, then the projection out"
    if not weights_used:
        reason += "; its attention weights, which the model does not use, are not computed"
    role = Role("heads", Shard.even(0, module.embed_dim, ranks), weights_used)
    return Region({module: role}, [name], reason=reason)


def _hidden(module: Any, name: str, recording: Recording, ranks: int) -> Region:
    """Return the region of a recurrent layer or cell: a part of the hidden units on every rank."""
    size = module.hidden_size
    if size % ranks:
        raise CannotShard(f"{size} hidden units cannot be shared out over {ranks} ranks")
    if getattr(module, "proj_size", 0):
        raise CannotShard("a recurrent layer with a projection (proj_size) has no tensor-parallel form")
    packed = any(isinstance(call.args[0], tuple) for call in recording.calls if call.module is module)
    role = Role("hidden", Shard.even(0, size, ranks), packed)
    reason = "its sequences are packed: weights are gathered" if packed else "by hidden units, gathered after each step"
    return Region({module: role}, [name], reason=reason)


def _tied(
    embedding: nn.Embedding, linear: nn.Module, names: dict[nn.Module, str], recording: Recording, ranks: int
) -> Region:
    """Return the region of an embedding and the output layer of the same matrix: both by words, or both by features."""
    called = {call.module for call in recording.calls}
    if embedding not in called or linear not in called:
        raise CannotShard("the sample did not get there")
    _check_embedding(embedding)
    words, features = (int(n) for n in embedding.weight.shape)
    both = [names[embedding], names[linear]]
    if words % ranks == 0:
        split = Shard.even(0, words, ranks)
        roles = {embedding: Role("vocabulary", split), linear: Role("column", split, True)}
        return Region(roles, both, reason="one matrix, cut by words; logits are gathered")
    if features % ranks == 0:
        split = Shard.even(0, features, ranks)
        roles = {embedding: Role("column", split, True), linear: Role("row", split, True)}
        return Region(roles, both, reason=f"one matrix, cut by features, since {words} words cannot be shared out")
    raise CannotShard(f"neither {words} words nor {features} features can be shared out over {ranks} ranks")


def _check_embedding(embedding: Any) -> None:
    if embedding.max_norm is not None:
        raise CannotShard("an embedding with max_norm changes its rows as it reads them")
    if embedding.scale_grad_by_freq or embedding.sparse:
        raise CannotShard("an embedding with sparse or frequency-scaled gradients has no tensor-parallel form")


def _alone(module: nn.Module, name: str, why: str, ranks: int) -> Region | None:
    """Return the region of a layer that pairs with no other."""
    if isinstance(module, TABLES):
        _check_embedding(module)
        words, features = module.weight.shape
        if features % ranks == 0:
            role = Role("column", Shard.even(0, features, ranks), True)
            return Region({module: role}, [name], reason="by features; vectors are gathered")
        if words % ranks == 0 and type(module) is nn.Embedding:
            role = Role("vocabulary", Shard.even(0, words, ranks))
            return Region({module: role}, [name], reason=f"by words, since {features} features cannot be shared out")
        if type(module) is nn.EmbeddingBag:
            raise CannotShard(f"{features} features of bags cannot be shared out over {ranks} ranks")
        raise CannotShard(f"neither {words} words nor {features} features can be shared out over {ranks} ranks")
    if type(module) not in CHANNEL:
        return None
    if getattr(module, "groups", 1) != 1:
        raise CannotShard("its groups of channels have no neighbour that makes parts")
    outputs, inputs = outputs_of(module), inputs_of(module)
    if outputs % ranks == 0:
        role = Role("column", Shard.even(0, outputs, ranks), True)
        return Region({module: role}, [name], reason=f"outputs are gathered: {why}")
    if inputs % ranks == 0:
        role = Role("row", Shard.even(0, inputs, ranks), True)
        return Region({module: role}, [name], reason=f"inputs are cut, since {outputs} outputs cannot be shared out")
    raise CannotShard(f"neither {outputs} outputs nor {inputs} inputs can be shared out over {ranks} ranks")
