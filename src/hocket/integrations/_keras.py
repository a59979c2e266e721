"""Keras 3: `model.fit(..., callbacks=[hocket.integrations.KerasRecorder()])`."""

from typing import Any

import keras

from ._steps import LoopRecord


class KerasRecorder(keras.callbacks.Callback):  # type: ignore[misc]  # Keras carries no types
    """Records each batch as a step with its loss, evaluation as a phase, and what an epoch logs.

    It does not need `hocket.keras`: a job of any backend of Keras is recorded where HOCKET_RECORD says where.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loop = LoopRecord()
        self._step = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._loop.begin()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step += 1
        self._loop.stepped()
        if logs and "loss" in logs:
            self._loop.values({"loss": logs["loss"]}, self._step)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._loop.values({name: value for name, value in (logs or {}).items() if name != "loss"}, self._step)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._loop.enter("evaluation")

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._loop.leave("evaluation")
