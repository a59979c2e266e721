"""The callbacks in the loops of the libraries themselves; Lightning is tried where it is installed."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.explain import explain, report
from hocket.profile import STEP, read_run
from hocket.testing import deadline

COMMON = """
import sys, torch, hocket.integrations as integrations
torch.manual_seed(0)
x, y = torch.randn(32, 4), torch.randn(32, 1)
"""

KERAS = """
import os; os.environ["KERAS_BACKEND"] = "torch"
import keras
model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x.numpy(), y.numpy(), batch_size=8, epochs=3, verbose=0, validation_data=(x.numpy(), y.numpy()),
          callbacks=[integrations.KerasRecorder()])
"""

TRANSFORMERS = """
from transformers import Trainer, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def forward(self, x, labels=None):
        out = self.net(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}
rows = [{"x": a, "labels": b} for a, b in zip(x, y)]
arguments = TrainingArguments(sys.argv[1], per_device_train_batch_size=4, gradient_accumulation_steps=2,
    num_train_epochs=3, logging_steps=2, eval_strategy="epoch", save_strategy="epoch",
    report_to=[], use_cpu=True, disable_tqdm=True)
recorder = integrations.TransformersRecorder()
Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=[recorder]).train()
"""

LIGHTNING = """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def validation_step(self, batch):
        self.log("error", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
lightning.Trainer(accelerator="cpu", max_epochs=3, accumulate_grad_batches=2, log_every_n_steps=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1],
    num_sanity_val_steps=0, callbacks=[integrations.LightningRecorder()]).fit(Module(), loader, loader)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("library", "program", "values", "phases"),
    [
        ("keras", KERAS, {"loss": 12, "val_loss": 3}, {"evaluation": 3}),
        pytest.param(
            "transformers",
            TRANSFORMERS,
            {"loss": 6, "eval_loss": 3},
            {"evaluation": 3, "checkpoint": 3},
            marks=pytest.mark.third_party,
        ),
        pytest.param("lightning", LIGHTNING, {"loss": 6, "error": 3}, {"evaluation": 3}, marks=pytest.mark.third_party),
    ],
)
def test_steps_losses_and_phases_of_a_librarys_loop_are_in_the_record(
    tmp_path: Path, library: str, program: str, values: dict[str, int], phases: dict[str, int]
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    script = tmp_path / "train.py"
    script.write_text(COMMON + program)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out")], capture_output=True, text=True, check=False,
        timeout=deadline(90), env={**os.environ, "HOCKET_RECORD": str(tmp_path / "record")}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "record")
    (one,) = run.ranks
    assert one.of(STEP)["seq"].tolist() == list(range(1, 13)), "3 epochs of 4 updates, none of them twice"
    assert {name: len(rows) for name, rows in one.values().items() if name in values} == values
    assert np.isfinite(one.values()["loss"]["value"]).all()
    assert one.values()["loss"]["step"].tolist() == np.linspace(12 // values["loss"], 12, values["loss"]).tolist()
    for name, count in phases.items():
        spans = one.phases()[name]
        assert len(spans) >= count
        assert (spans[:, 1] > spans[:, 0]).all()
    text = report(explain(tmp_path / "record"))
    assert "<h2>Values" in text
    assert f"{one.values()['loss']['value'][-1]:.6g}" in text


def test_who_counts_steps_too_is_not_doubled_and_values_that_are_no_numbers_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hocket.integrations._steps import LoopRecord
    from hocket.profile import _watch
    from hocket.profile._record import RankRecord

    record = RankRecord(tmp_path, 0, 1)
    active: Any = _watch.Watch.__new__(_watch.Watch)  # without its thread and listeners
    active.record, active.told, active.resting, active.steps, active.last_s = record, False, False, 0, 0.0
    monkeypatch.setattr(_watch, "_watch", active)
    loop = LoopRecord()
    loop.begin()
    for step in range(1, 9):
        if step % 2:
            _watch.mark_step(0.0, 1.0)  # as `Trainer.step` does
        loop.stepped()
        loop.values({"loss": math.nan if step > 6 else 1.0, "name": "text", "none": None}, step)
    record.ended()
    run = read_run(tmp_path)
    assert run.ranks[0].of(STEP)["seq"].tolist() == list(range(1, 9))
    assert list(run.ranks[0].values()) == ["loss"]
    first = explain(tmp_path).verdicts[0]
    assert (first.kind, first.ranks, first.since_step) == ("not a number", (), 7)
    assert "loss is nan since step 7" in first.sentence
