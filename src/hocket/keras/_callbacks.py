"""Which callbacks a rank runs, and how the others follow what rank 0's have done."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras

from hocket.parallel.mesh import World

from ._broadcast import StateBroadcast
from .callbacks import Callback


class Follow(keras.callbacks.Callback):  # type: ignore[misc]  # Keras carries no types
    """The last of every rank's callbacks: ranks follow what those of rank 0 have done."""

    def __init__(self, world: World, broadcast: StateBroadcast) -> None:
        super().__init__()
        self._world = world
        self._broadcast = broadcast
        self.after_batches = False  # whether ranks follow around every batch, not only where epochs begin and end
        self.watched: list[Callback] = []  # on rank 0, the callbacks that no other rank runs

    def on_train_begin(self, logs: Any = None) -> None:
        """Take over what rank 0 has loaded, say."""
        self._broadcast.align()
        self.model._initial_epoch = self._world.from_root(self.model._initial_epoch)
        self._follow()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Agree on random numbers, which a callback of rank 0 may have drawn, for a prediction of its own."""
        self._broadcast.agree_on_random_numbers()
        self._follow()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._broadcast.send_state()
        self._follow()

    def on_test_begin(self, logs: Any = None) -> None:
        """Have all ranks validate with rank 0's moving averages."""
        self._broadcast.send_state()
        self._follow()

    def on_train_end(self, logs: Any = None) -> None:
        """Take over what a callback of rank 0 has restored. Stages of a pipeline keep what each of them has trained."""
        if type(self._broadcast).gather is StateBroadcast.gather:
            self._broadcast.align()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.after_batches:
            self._follow()

    on_train_batch_end = on_train_batch_begin

    def _follow(self) -> None:
        model = self.model
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)  # that of a loss scale has another's
        rate: Any = getattr(optimizer, "_learning_rate", None)
        settable = isinstance(rate, keras.Variable)
        changed: dict[Any, Any] = {}
        for one in self.watched:
            changed |= one._changed
            one._changed = {}
        mine = (bool(model.stop_training), float(rate) if settable else None, changed)
        stop, value, changed = self._world.from_root(mine)
        model.stop_training = stop
        if settable and value != mine[1]:
            optimizer.learning_rate = value
        if changed.pop(_VARIABLES, None) is not None:
            self._broadcast.align()
        if changed and self._world.rank > 0:
            owners = _owners(model)
            for (number, name), setting in changed.items():
                setattr(owners[number], name, setting)


_VARIABLES = "variables"


def _owners(model: Any) -> list[Any]:
    return [*model._flatten_layers(), getattr(model.optimizer, "inner_optimizer", model.optimizer)]


def _looked(callback: Any) -> dict[Any, Any]:
    """Return what a callback may change of its model: how often its variables have been, and plain attributes."""
    owners = _owners(callback.model)
    variables = [*callback.model.variables, *getattr(owners[-1], "variables", ())]
    found: dict[Any, Any] = {_VARIABLES: [v.value._version for v in variables]}
    for number, owner in enumerate(owners):
        for name, value in (vars(owner) | {"trainable": getattr(owner, "trainable", None)}).items():
            if isinstance(value, bool | int | float | str) and name[0] != "_" and name != "stop_training":
                found[number, name] = value
    return found


class CollectOptimizerState(keras.callbacks.Callback):  # type: ignore[misc]
    """The first of every rank's callbacks, where the optimizer's state is sharded: rank 0 may want to save it.

    `collect` puts the whole state together on rank 0.
    """

    def __init__(self, collect: Callable[[], None]) -> None:
        super().__init__()
        self._collect = collect

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._collect()

    def on_train_end(self, logs: Any = None) -> None:
        self._collect()


def placed(
    callbacks: Any,  # the user's callbacks: one, several, or None
    world: World,  # the ranks
    # a function that makes of logs over all ranks' samples those over this rank's, of "train" or "test"
    own_logs: Callable[[Any, str], Any],
    follow: Follow | None,  # for `fit`, the last callback
    collect: Callable[[], None] | None,  # for `fit` with a sharded optimizer, what puts its state together on rank 0
    # for `fit` where ranks train weights of their own, what brings these together
    gather: Callable[[], None] | None = None,
    resume: Any = None,  # for `fit`, a callback of all ranks that saves, after the user's
) -> list[Any]:
    """Return the callbacks that this rank is to run.

    Raises:
        TypeError: one of them is no Keras callback.
        ValueError: one is to save a sharded optimizer in the middle of an epoch.
    """
    wrapped = wrap(callbacks)
    here: list[Any] = []
    if collect is not None and (resume is not None or any(item.may_save for item in wrapped)):
        for item in wrapped:
            if item.may_save and getattr(item.callback, "save_freq", "epoch") != "epoch":
                raise ValueError(
                    f"{type(item.callback).__name__} has save_freq={item.callback.save_freq!r}, and with "
                    "shard= or pipeline= the optimizer's state is put together where epochs end: say "
                    'save_freq="epoch"'
                )
        here.append(CollectOptimizerState(collect))
    elif gather is not None:
        here.append(CollectOptimizerState(gather))
    for item in wrapped:
        if world.rank > 0 and not item.run_on_all_ranks:
            continue
        if world.rank > 0 and item.steers and hasattr(item.callback, "verbose"):
            item.callback.verbose = 0  # one rank says it
        item._own_logs = own_logs
        watched = follow is not None and world.size > 1 and item.may_meddle
        if watched and follow is not None:
            item._look, item._changed = partial(_looked, item.callback), {}
            item._looks_at_batches = _works_on_batches(item.callback)
            follow.watched.append(item)
        here.append(item if watched or not item.aggregate_logs else item.callback)
    if resume is not None:
        here.append(resume)
    if follow is not None and world.size > 1:
        if any(item.may_meddle and _works_on_batches(item.callback) for item in wrapped):
            follow.after_batches = True
        here.append(follow)
    return here


def wrap(callbacks: Any) -> list[Callback]:
    """Return the user's callbacks, each in a `Callback`. Raises TypeError: one of them is no Keras callback."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise TypeError("pass callbacks as a list of callbacks, not as a CallbackList, so that hocket can place them")
    given = [callbacks] if isinstance(callbacks, keras.callbacks.Callback) else list(callbacks or ())
    return [c if isinstance(c, Callback) else Callback(c) for c in given]


def _works_on_batches(callback: Any) -> bool:
    base = keras.callbacks.Callback
    hooks = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    return any(getattr(getattr(callback, name), "__func__", None) is not getattr(base, name) for name in hooks)
