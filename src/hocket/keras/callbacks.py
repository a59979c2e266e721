"""Where callbacks run, and which logs they see."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras

from hocket.parallel._alike import send_once
from hocket.parallel._world import World

__all__ = ["Callback"]

_STEERING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TerminateOnNaN,
)
"""Callbacks of Keras' that change the course of training by logs and weights alone: the same on every rank."""

_SAVING = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)
_WRITING = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""Callbacks of Keras' that do not steer after training has begun."""


class Callback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras carries no types
    """Says of a callback where it runs and which logs it sees.

    Without this, a callback sees logs over all ranks' samples. Keras' own that steer training (EarlyStopping,
    ReduceLROnPlateau, LearningRateScheduler, TerminateOnNaN, SwapEMAWeights, History) run on every rank, which comes to
    the same decision everywhere; all others run on rank 0 only. What such a one does to the optimizer's learning rate
    and to `model.stop_training` all ranks follow; one that changes weights must run on all ranks.

    Args:
        callback: a Keras callback.
        run_on_all_ranks: whether every rank runs it; None to choose as above.
        aggregate_logs: whether its logs are over all ranks' samples, rather than over this rank's own.

    Raises:
        TypeError: `callback` is no Keras callback.
    """

    def __init__(self, callback: Any, *, run_on_all_ranks: bool | None = None, aggregate_logs: bool = True) -> None:
        super().__init__()
        if not isinstance(callback, keras.callbacks.Callback):
            raise TypeError(f"callbacks are instances of keras.callbacks.Callback, and {callback!r} is none")
        self.callback = callback
        self.run_on_all_ranks = isinstance(callback, _STEERING) if run_on_all_ranks is None else run_on_all_ranks
        self.aggregate_logs = aggregate_logs
        self._own_logs: Callable[[Any], Any] = lambda logs: logs

    def set_params(self, params: Any) -> None:
        """As Keras calls it."""
        self.callback.set_params(params)

    def set_model(self, model: Any) -> None:
        """As Keras calls it."""
        self.callback.set_model(model)

    @property
    def model(self) -> Any:
        """The Keras model."""
        return self.callback.model

    @property
    def follows(self) -> bool:
        """Whether other ranks must look at what rank 0 has done here."""
        return not self.run_on_all_ranks and type(self.callback) not in _WRITING


def _forward(name: str) -> Callable[..., Any]:
    def hook(self: Callback, *args: Any, logs: Any = None) -> Any:
        takes_position = "epoch" in name or "batch" in name
        if len(args) > takes_position:
            *args_, logs = args
            args = tuple(args_)
        if not self.aggregate_logs:
            logs = self._own_logs(logs)
        return getattr(self.callback, name)(*args, logs=logs)

    hook.__name__ = name
    hook.__doc__ = "As Keras calls it."
    return hook


_HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]
for _name in _HOOKS:
    setattr(Callback, _name, _forward(_name))


class _Follow(keras.callbacks.Callback):  # type: ignore[misc]
    """The last of every rank's callbacks: ranks follow what those of rank 0 have done."""

    def __init__(self, world: World, align: Callable[[], None]) -> None:
        super().__init__()
        self._world = world
        self._align = align

    def on_train_begin(self, logs: Any = None) -> None:
        self._align()
        self.model._initial_epoch = self._world.from_root(self.model._initial_epoch)
        self.follow()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.follow()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.follow()

    def follow(self) -> None:
        model = self.model
        rate: Any = getattr(model.optimizer, "_learning_rate", None)
        settable = isinstance(rate, keras.Variable)
        mine = (bool(model.stop_training), float(rate) if settable else None)
        stop, value = self._world.from_root(mine)
        model.stop_training = stop
        if settable and value != mine[1]:
            model.optimizer.learning_rate = value


class _FollowBatches(_Follow):
    """The same, after every batch: for callbacks that may do something there."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.follow()


def placed(
    callbacks: Any, world: World, align: Callable[[], None], own_logs: Callable[[Any], Any], *, training: bool
) -> list[Any]:
    """The callbacks that this rank is to run.

    Args:
        callbacks: the user's: one, several, or None.
        world: the ranks.
        align: gives all ranks rank 0's model and optimizer.
        own_logs: makes of logs over all ranks' samples those over this rank's.
        training: whether they are for `fit`.

    Raises:
        TypeError: one of them is no Keras callback.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise TypeError("pass callbacks as a list of callbacks, not as a CallbackList, so that hocket can place them")
    given = [callbacks] if isinstance(callbacks, keras.callbacks.Callback) else list(callbacks or ())
    wrapped = [c if isinstance(c, Callback) else Callback(c) for c in given]
    here: list[Any] = []
    for item in wrapped:
        if world.rank > 0 and not item.run_on_all_ranks:
            continue
        if world.rank > 0 and isinstance(item.callback, _STEERING) and hasattr(item.callback, "verbose"):
            item.callback.verbose = 0  # one rank says it
        item._own_logs = own_logs
        here.append(item.callback if item.aggregate_logs else item)
    if training:
        batches = any(item.follows and _works_on_batches(item.callback) for item in wrapped)
        here.append((_FollowBatches if batches else _Follow)(world, align))
    return here


def _works_on_batches(callback: Any) -> bool:
    base = keras.callbacks.Callback
    hooks = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    return any(getattr(getattr(callback, name), "__func__", None) is not getattr(base, name) for name in hooks)


def send_variables(variables: Iterable[Any], world: World) -> None:
    """Gives all ranks rank 0's values of Keras variables."""
    if world.size > 1:
        unique = {id(v): v.value for v in variables}
        send_once([value.detach() for value in unique.values() if value.numel()], world)
