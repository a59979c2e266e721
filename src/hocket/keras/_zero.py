"""A Keras optimizer of sharded state: each rank updates its share of the variables (stage 1 of ZeRO)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hocket import comm
from hocket.parallel.batches import views_like
from hocket.parallel.mesh import World

from . import _private


class ZeroOptimizer:
    """Makes a Keras optimizer keep state for this rank's variables only (Rajbhandari et al. 2020, stage 1).

    Every variable belongs to one rank as a whole, so that any optimizer may look at a variable's gradient as it likes;
    they are given out from the largest to the smallest, each to the rank that has least. After a step every rank sends
    its variables to the others. `owners` says which rank each variable belongs to; None to give them out. Raises
    ValueError: an option of the optimizer needs the state of all variables in one place.
    """

    remedy = 'say shard="none"'
    """What to do where the state cannot be sharded."""

    def __init__(self, optimizer: Any, variables: list[Any], world: World, owners: list[int] | None = None) -> None:
        _check(optimizer, variables, self.remedy)
        self.optimizer = optimizer
        self._variables = list(variables)
        self._world = world
        sizes = [int(v.value.numel()) * v.value.element_size() for v in variables]
        self._owners = _given_out(sizes, world.size) if owners is None else owners
        self._mine = [v for v, owner in zip(variables, self._owners, strict=True) if owner == world.rank]
        self._whole: Any = None  # on rank 0, an optimizer with the state of all variables, as of the latest `collect`
        self._loaded = False  # `_whole` has been read from a file
        self._collected_at = -1  # the iteration of which `_whole` has the state
        self._apply, self._clip = optimizer.apply, optimizer._clip_gradients
        if not optimizer.built:
            optimizer.build(self._mine)
        else:
            self._divide_built()
        self._install()

    def holds(self, optimizer: Any, variables: list[Any]) -> bool:
        """Return whether this was made for this optimizer; some of the variables may be frozen now.

        Raises:
            ValueError: there are others among `variables`, of which the optimizer does not know, as in plain Keras.
        """
        if optimizer is not self.optimizer:
            return False
        known = {id(v) for v in self._variables}
        for variable in variables:
            if id(variable) not in known:
                raise ValueError(
                    f"the optimizer was built without {variable.path!r}, which is trained now: compile the model with "
                    "a new optimizer"
                )
        return True

    # --- a step -----------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        own = self.optimizer.__dict__
        own["apply"] = self.apply
        own["save_own_variables"] = self._save
        own["load_own_variables"] = self._load

    def apply(self, gradients: Any, variables: Any = None) -> None:
        """Update this rank's variables and send them to the others, in the place of the optimizer's own method."""
        pairs = list(zip(gradients, self._variables if variables is None else variables, strict=True))
        limit = self.optimizer.global_clipnorm
        if limit is not None:  # the norm is that of all gradients, which every rank has
            present = [gradient for gradient, _ in pairs if gradient is not None]
            clipped = iter(self._clip(present))
            pairs = [(None if gradient is None else next(clipped), variable) for gradient, variable in pairs]
        self._update(pairs)
        publish(self._variables, self._owners, self._world)

    def _update(self, pairs: list[tuple[Any, Any]]) -> None:
        """Update this rank's variables by gradients whose norm over all has been clipped already."""
        optimizer, limit = self.optimizer, self.optimizer.global_clipnorm
        owner_of = {id(v): owner for v, owner in zip(self._variables, self._owners, strict=True)}
        mine = [(g, v) for g, v in pairs if owner_of.get(id(v)) == self._world.rank and g is not None]
        optimizer.global_clipnorm = None
        try:
            if mine:
                self._apply([g for g, _ in mine], [v for _, v in mine])
            else:
                optimizer._iterations.assign_add(1)
        finally:
            optimizer.global_clipnorm = limit

    # --- the whole state --------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Put together on rank 0 the state of all variables, for files; a collective operation."""
        if self._collected_at == int(self.optimizer._iterations):
            return
        parts = self._world.from_all({v.name: v.value.detach().cpu() for v in self.optimizer.variables})
        if self._world.rank == 0:
            self._whole = self._whole or self._clone()
            state = {name: value for part in reversed(parts) for name, value in part.items()}
            for variable in self._whole.variables:
                variable.assign(state[variable.name])
        self._collected_at = int(self.optimizer._iterations)

    def scatter(self) -> None:
        """Give each rank its part of the state, if rank 0 has read it from a file; a collective operation."""
        state: Any = None
        if self._world.rank == 0 and self._loaded:
            state = {v.name: v.value.detach().cpu() for v in self._whole.variables}
        state = self._agreed(state)
        self._loaded = False
        if state is not None:
            for variable in self.optimizer.variables:
                variable.assign(state[variable.name])
            self._collected_at = -1

    def _agreed(self, state: Any) -> Any:
        """Return what rank 0 has."""
        return self._world.from_root(state)

    def _clone(self) -> Any:
        whole = type(self.optimizer).from_config(self.optimizer.get_config())
        whole.build(self._variables)
        return whole

    def _save(self, store: Any) -> None:
        if self._collected_at != int(self.optimizer._iterations):
            raise RuntimeError(
                "the state of the optimizer is sharded among ranks, and rank 0 has not collected it since "
                "the last step: call save of the hocket.keras.Model on all ranks, or save where an epoch ends"
            )
        if not self._loaded:  # since then a callback, or the program, may have set the learning rate
            now = {v.name: v for v in self.optimizer.variables}
            for variable in self._whole.variables:
                variable.assign(now.get(variable.name, variable))
        self._whole.save_own_variables(store)

    def _load(self, store: Any) -> None:
        self._whole = self._whole or self._clone()
        self._whole.load_own_variables(store)
        self._loaded = True

    def _divide_built(self) -> None:
        """Keep this rank's part of state that the optimizer had already."""
        optimizer = self.optimizer
        state = {v.name: v.value.detach() for v in optimizer.variables}
        part = type(optimizer).from_config(optimizer.get_config())
        part.build(self._mine)
        for variable in part.variables:
            variable.assign(state[variable.name])
        for name in part.__dict__:
            if name not in ("_lock", "_tracker", "name"):
                optimizer.__dict__[name] = part.__dict__[name]
        optimizer.__dict__["_tracker"] = part.__dict__["_tracker"]


@torch.no_grad()
def publish(variables: list[Any], owners: list[int], world: World) -> None:
    """Give every rank the values of the variables that others own; a collective operation."""
    under_way = []
    with comm.label("keras weights"):
        for owner in range(world.size):
            values = [v.value for v, o in zip(variables, owners, strict=True) if o == owner and v.value.numel()]
            for dtype in sorted({value.dtype for value in values}, key=str):
                same = [value for value in values if value.dtype is dtype]
                flat = torch.cat([value.reshape(-1) for value in same])
                flat = flat.to(torch.uint8) if dtype is torch.bool else flat
                root = dist.get_global_rank(world.group, owner)
                work = dist.broadcast(flat, src=root, group=world.group, async_op=True)
                under_way.append((work, owner, flat, same))
        for work, owner, flat, same in under_way:
            work.wait()
            if owner != world.rank:
                for value, part in zip(same, views_like(flat, same), strict=True):
                    value.copy_(part)


def _check(optimizer: Any, variables: list[Any], remedy: str) -> None:
    accumulates = bool(optimizer.gradient_accumulation_steps)
    reasons = {
        "loss scaling (mixed_float16)": isinstance(optimizer, _private.LossScaleOptimizer),
        "use_ema=True": optimizer.use_ema,
        "gradient_accumulation_steps and global_clipnorm": accumulates and optimizer.global_clipnorm is not None,
        "a variable whose path another one has too": len({v.path for v in variables}) < len(variables),
    }
    for reason, found in reasons.items():
        if found:
            raise ValueError(f"an optimizer with {reason} needs all variables in one place: leave it out, or {remedy}")


def _given_out(sizes: list[int], ranks: int) -> list[int]:
    """Return the owner of each variable: from the largest to the smallest, to the rank that has least."""
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[number] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[owners[number]] += sizes[number]
    return owners


@contextmanager
def unbuilt(optimizer: Any) -> Iterator[None]:
    """Open a block in which Keras does not build the optimizer, because it is to be built in parts."""
    built, optimizer.built = optimizer.built, True
    try:
        yield
    finally:
        optimizer.built = built
