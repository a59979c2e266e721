"""Transformers: `Trainer(..., callbacks=[hocket.integrations.TransformersRecorder()])`."""

from typing import Any

from transformers import TrainerCallback

from ._steps import LoopRecord

_PROGRESS = {"epoch", "step", "total_flos", "train_runtime", "train_samples_per_second", "train_steps_per_second"}


class TransformersRecorder(TrainerCallback):
    """Records each update of the weights as a step, evaluation as a phase, and what the Trainer logs (loss, ...).

    Checkpoints are a phase from the last log or evaluation of a step to the Trainer's word that it has saved.
    """

    def __init__(self) -> None:
        self._loop = LoopRecord()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loop.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loop.stepped()
        self._next(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        kept = {name: value for name, value in (logs or {}).items() if name not in _PROGRESS}
        self._loop.values(kept, state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loop.leave("evaluation")
        self._next(control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loop.leave("checkpoint")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._next(control)

    def _next(self, control: Any) -> None:
        """Begin what the Trainer does now: it has set what it wants, and logs, evaluates and saves in this order."""
        if control.should_evaluate:
            self._loop.enter("evaluation")
        elif control.should_save:
            self._loop.enter("checkpoint")
