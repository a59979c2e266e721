"""Lightning: `Trainer(..., callbacks=[hocket.integrations.LightningRecorder()])`."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.callbacks import Callback

from ._steps import LoopRecord


class LightningRecorder(Callback):  # type: ignore[misc, unused-ignore]  # Lightning may not be installed
    """Records each update of the weights as a step, evaluation as a phase, and losses as often as the Trainer logs.

    A loss is read every `log_every_n_steps` steps only, since reading it waits for the device.
    """

    def __init__(self) -> None:
        self._loop = LoopRecord()
        self._updates = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._updates = trainer.global_step
        self._loop.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._updates:
            return  # the gradients of this batch are added to the next one's
        self._updates = trainer.global_step
        self._loop.stepped()
        if self._updates % max(1, trainer.log_every_n_steps) == 0:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            self._loop.values({"loss": loss}, self._updates)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._loop.enter("evaluation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._loop.leave("evaluation")
        self._loop.values(dict(trainer.callback_metrics), trainer.global_step)
