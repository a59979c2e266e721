"""Where callbacks run, and which logs they see."""

from collections.abc import Callable
from typing import Any

import keras

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

_TELLING = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
_SAVING = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)


class Callback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras carries no types
    """Says of a callback where it runs and which logs it sees.

    Without this, a callback sees logs over all ranks' samples. Keras' own that steer training (EarlyStopping,
    ReduceLROnPlateau, LearningRateScheduler, TerminateOnNaN, SwapEMAWeights, History) run on every rank, which comes to
    the same decision everywhere; all others run on rank 0 only. What such a one does to variables of the model and the
    optimizer, to their layers' plain attributes (numbers, texts, `trainable`), and to `model.stop_training`, all ranks
    follow; one that changes anything else that training goes by must run on all ranks.

    Args:
        callback: A Keras callback.
        run_on_all_ranks: Whether every rank runs it; None to choose as above.
        aggregate_logs: Whether its logs are over all ranks' samples, rather than over this rank's own.

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
        self._own_logs: Callable[[Any, str], Any] = lambda logs, phase: logs
        self._look: Callable[[], dict[Any, Any]] = dict  # what of the model it may change on one rank, by place
        self._looks_at_batches = False
        self._changed: dict[Any, Any] = {}  # what it has changed

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
    def steers(self) -> bool:
        """Whether all ranks run it for it decides on the course of training."""
        return isinstance(self.callback, _STEERING)

    @property
    def may_meddle(self) -> bool:
        """Whether other ranks must look, during training, at what rank 0 has done here."""
        return not self.run_on_all_ranks and type(self.callback) not in (*_TELLING, *_SAVING)

    @property
    def may_save(self) -> bool:
        """Whether it may want the whole state of the optimizer, on rank 0 alone."""
        return not self.run_on_all_ranks and type(self.callback) not in _TELLING


def _forward(name: str) -> Callable[..., None]:
    numbered = int("epoch" in name or "batch" in name)  # what is given before the logs
    phase = "test" if "test" in name else "train"

    def hook(self: Callback, *args: Any, **kwargs: Any) -> None:
        if not self.aggregate_logs:
            args = (*args[:numbered], *(self._own_logs(one, phase) for one in args[numbered:]))
            kwargs = {key: self._own_logs(one, phase) if key == "logs" else one for key, one in kwargs.items()}
        look = self._look if self._looks_at_batches or "batch" not in name else dict
        before = look()
        getattr(self.callback, name)(*args, **kwargs)
        self._changed |= {place: value for place, value in look().items() if before.get(place) != value}

    hook.__name__ = name
    hook.__doc__ = "As Keras calls it."
    return hook


_HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]
for _name in _HOOKS:
    setattr(Callback, _name, _forward(_name))
