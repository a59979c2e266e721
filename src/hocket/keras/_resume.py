"""Resuming `fit` after a preemption or a time limit, at the beginning of the epoch in which it was told to end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from hocket.parallel import CheckpointError
from hocket.parallel.compose import Preemption
from hocket.parallel.mesh import World
from hocket.parallel.state import alike
from hocket.parallel.state.checkpoint import exists
from hocket.parallel.state.objects import read_objects, write_objects

from ._broadcast import StateBroadcast
from ._data import SharedData

_CONDUCT = {  # what Keras' own callbacks remember from epoch to epoch
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best",),
}


class Resume(keras.callbacks.Callback):  # type: ignore[misc]  # Keras carries no types
    """Saves where each epoch ends, goes on there, and ends the program between two batches when it is told to.

    Runs on all ranks after the user's callbacks, which have reset themselves when training begins.
    """

    def __init__(self, path: Path, world: World, broadcast: StateBroadcast) -> None:
        super().__init__()
        self._path = path.absolute()  # the program may change its directory
        self._world = world
        self._broadcast = broadcast
        self._data: SharedData | None = None
        self._others: list[Any] = []  # callbacks that remember, by kind and in their order
        self._history: dict[str, list[Any]] = {}
        self._epochs: list[int] = []
        self._before = 0  # epochs of the runs before
        self._preemption = Preemption(world, path, lambda: None)  # epochs' ends have saved

    def follow(self, data: SharedData, callbacks: Sequence[Any], steps: int | None) -> None:
        """Say what is to be trained on, and beside which callbacks.

        Raises:
            ValueError: `fit` is called a second time, or the sequence of its batches cannot be taken up again.
        """
        if self._data is not None:
            raise ValueError("one fit can be resumed: call resume of another Model, with another path, for the next")
        if not data.repeatable:
            raise ValueError(
                "resume: generators and PyDatasets cannot be taken up where an earlier run has left them; give fit "
                "arrays or a torch DataLoader"
            )
        if steps is not None and data.of_arrays:
            raise ValueError(
                f"resume: with steps_per_epoch = {steps} an epoch of arrays begins where the one before has ended, and "
                "that cannot be taken up; leave steps_per_epoch out, or give fit a torch DataLoader"
            )
        self._data = data
        self._others = [one for one in callbacks if isinstance(one, tuple(_CONDUCT))]

    def on_train_begin(self, logs: Any = None) -> None:
        """Go on, or keep the beginning."""
        self._preemption.begun = True  # also where no epoch is left
        if exists(self._path, self._world):
            self._load(read_objects(self._path, self._world))
        else:
            self._save(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End if told to."""
        self._preemption.check()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save."""
        self._epochs.append(epoch)
        for name, value in (logs or {}).items():
            self._history.setdefault(name, []).append(value)
        self._save(epoch + 1)
        self._preemption.check()

    def whole(self, history: Any) -> Any:
        """Return Keras' History with the epochs of the runs before."""
        history.epoch, history.history = self._epochs, self._history
        return history

    def _variables(self) -> list[Any]:
        optimizer = self.model.optimizer
        return [*self.model.variables, *(optimizer.variables if optimizer.built else ())]

    def _kept(self) -> list[dict[str, Any]]:
        kinds = [next(kind for kind in _CONDUCT if isinstance(one, kind)) for one in self._others]
        pairs = zip(self._others, kinds, strict=True)
        return [{name: getattr(one, name, None) for name in _CONDUCT[kind]} for one, kind in pairs]

    def _save(self, epoch: int) -> None:
        assert self._data is not None
        state = {
            "optimizer": type(self.model.optimizer).__name__,
            "variables": [v.value.detach().cpu() for v in self._variables()],
            "epoch": epoch,
            "stopped": bool(self.model.stop_training),
            "callbacks": self._kept(),
            "history": self._history,
            "epochs": self._epochs,
            "position": self._data.position(),
        }
        write_objects(self._path, state, self._world)

    def _take(self, saved: Sequence[Any], optimizer: str | None) -> None:
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        here = self._variables()
        kind = type(self.model.optimizer).__name__
        same = [(v.value.shape, v.value.dtype) for v in here] == [(value.shape, value.dtype) for value in saved]
        if not same or (optimizer or kind) != kind:
            raise CheckpointError(
                f"the checkpoint at {str(self._path)!r} is of another model or optimizer ({optimizer}; here {kind})"
            )
        for variable, value in zip(here, saved, strict=True):
            variable.assign(value)

    def _load(self, found: dict[str, Any]) -> None:
        assert self._data is not None
        if "variables" not in found:
            raise CheckpointError(f"the checkpoint at {str(self._path)!r} was not written by hocket.keras.Model.resume")
        self._broadcast.collect()
        with alike(self._world):
            if self._world.rank == 0:  # others follow (`Follow`)
                self._take(found["variables"], found.get("optimizer"))
        for one, kept in zip(self._others, found["callbacks"], strict=False):
            for name, value in kept.items():
                setattr(one, name, value)
        self._history, self._epochs = found["history"], found["epochs"]
        self._data.resume(found["position"])
        self.model._initial_epoch = self.params["epochs"] if found["stopped"] else found["epoch"]
