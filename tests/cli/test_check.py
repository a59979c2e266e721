import contextlib
import json
import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch

from hocket.cli import main
from hocket.launch import LaunchResult
from hocket.testing import deadline, run_ranks

from ..processes import as_main

SCRIPT = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import hocket
from beside import squared  # a module beside the script

assert __name__ == "__main__"
parser = argparse.ArgumentParser()
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--adam", action="store_true")
parser.add_argument("--no-hocket", action="store_true")
parser.add_argument("--sum", action="store_true")
parser.add_argument("--broken", action="store_true")
parser.add_argument("--compression", default="none")
parser.add_argument("--epochs", type=int, default=6)
options = parser.parse_args()
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(options.dropout), nn.Linear(16, 1))
if options.adam:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
inputs = torch.randn(23, 6)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)
reduction = "sum" if options.sum else "mean"
if not options.no_hocket:
    model, optimizer, loader = hocket.distribute(
        model, optimizer, loader, loss_reduction=reduction, compression=options.compression
    )
if options.broken and torch.distributed.get_rank() == 1:
    raise RuntimeError("rank 1 is broken")
for epoch in range(options.epochs):
    for x, y in loader:
        optimizer.zero_grad()
        (0.1 * squared(model(x), y, reduction=reduction)).backward()
        optimizer.step()
print("trained")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("check") / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    (path.parent / "beside.py").write_text("from torch.nn.functional import mse_loss as squared")
    return path


@pytest.fixture
def checked(capfd, monkeypatch):
    """Check in this process, on ranks that fork instead of importing torch; exit status, and what it says."""

    def launched(command, n, *, env, timeout_s, stdout, stderr):
        here = Path.cwd()
        with contextlib.chdir(Path(__file__).parent):  # where the server of ranks stays if it begins now
            run_ranks(as_main, n, command[0], command[1:], str(here), backend=None)
        return LaunchResult("finished", 0, n, 0.0, 0)

    def check(*arguments):
        monkeypatch.setattr("hocket.launch.launch", launched)
        with pytest.raises(SystemExit) as ended:
            main(["check", *map(str, arguments)])
        return ended.value.code, *capfd.readouterr()

    return check


@pytest.mark.long
@pytest.mark.parametrize(("n", "flags"), [(3, ["--sum"]), (4, ["--adam"])])
def test_a_data_set_that_does_not_divide_learns_the_same(checked, script, n, flags):
    status, out, err = checked(script, "-n", n, "--steps", 18, "--json", "--", *flags)
    assert status == 0, out + err
    found = json.loads(out)
    assert found["equivalent"]
    assert len(found["one"]) == len(found["several"]) == 18
    assert found["worst"] < 1e-5
    assert found["one"][-1] < found["one"][0]


TRAINER = """
import torch, hocket
torch.manual_seed(0)
inputs = torch.randn(23, 6).double()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
model = torch.nn.Linear(6, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, optimizer, hocket.Plan(accumulate=2))
for batch in trainer.batches(loader):
    trainer.step(batch)
"""


def test_a_trainer_s_steps_are_compared_whatever_passes_they_make(checked, tmp_path):
    path = tmp_path / "trainer.py"
    path.write_text(TRAINER)
    status, out, err = checked(path, "--json")
    found = json.loads(out)
    assert status == 0, out + err
    assert found["equivalent"]
    assert found["worst"] < 1e-12
    assert len(found["one"]) == len(found["several"]) == 3


@pytest.mark.long
def test_dropout_is_found_and_named(checked, script):
    status, out, _ = checked(script, "-n", 2, "--", "--dropout", "0.5", "--epochs", "1")
    assert status == 1
    assert "Not equivalent" in out
    assert "The model drops values at random ('2')" in out


@pytest.mark.long
def test_a_script_without_distribute_is_told_so(checked, script):
    status, out, _ = checked(script, "-n", 2, "--", "--no-hocket", "--epochs", "1")
    assert status == 1
    # Every rank trains alone and alike: the losses agree, but nothing is gained.
    assert "Not equivalent, though the losses agree" in out
    assert "Each of the 2 ranks computed the same losses" in out
    assert "made no call to hocket.distribute" in out


@pytest.mark.long
def test_a_failing_script_shows_its_traceback(script):
    command = [sys.executable, "-m", "hocket", "check", str(script), "-n", "2", "--steps", "2", "--", "--broken"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=deadline(100), check=False)
    assert result.returncode == 2
    assert "RuntimeError: rank 1 is broken" in result.stderr
    assert "the run on 2 rank(s) failed" in result.stderr


@pytest.fixture
def refusal(capfd):
    """Check where it is refused, in this process, which has torch loaded; what it says."""

    def check(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["check", *map(str, arguments)])
        assert ended.value.code == 2
        return capfd.readouterr().err

    return check


@pytest.mark.long
def test_bad_input_is_named(tmp_path, refusal):
    assert "there is no script" in refusal(tmp_path / "none.py")
    empty = tmp_path / "empty.py"
    empty.write_text("print('nothing')")
    assert "made no backward pass" in refusal(empty)
    for wrong in ("0", "nan", "-1"):
        assert "--timeout" in refusal(empty, "--timeout", wrong)
    assert "--seed" in refusal(empty, "--seed", "1" + "0" * 400)


def test_what_is_no_python_is_refused_before_a_rank_is_started(tmp_path, refusal):
    wrong, zeros, archive = tmp_path / "wrong.py", tmp_path / "zeros.py", tmp_path / "weights.pt"
    wrong.write_text("import sys\nthis is none (")
    zeros.write_bytes(b"a\0b")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("data.pkl", "")
    for script, said in ((wrong, r"no Python program: .*never closed \(line 2\)"), (zeros, "null bytes"),
                         (archive, "archive without a __main__")):  # fmt: skip
        error = refusal(script)
        assert re.search(said, error)
        assert "Traceback" not in error
        assert "on 1 rank" not in error


def test_any_seed_counts_as_one_also_that_which_check_gives(tmp_path):
    from hocket.cli._check.rank import Notebook, Trainer, watch

    script = "import torch\nfrom torch import manual_seed\nmanual_seed(7)\ntorch.ones(1, requires_grad=True).backward()"
    for seed, text in [(7, script), (7, script.replace("manual_seed(7)", "torch.random.manual_seed(7)"))]:
        kept = torch.autograd.backward, torch.manual_seed, torch.random.manual_seed, torch.get_rng_state()
        methods = Trainer.__init__, Trainer.step
        try:
            torch.manual_seed(seed)
            notebook = Notebook(tmp_path, 0, 0, seed)
            watch(notebook)
            assert not notebook.seeded
            exec(text, {})
            notebook.close()
            assert json.loads((tmp_path / "facts-0.json").read_text())["seeded"]
        finally:
            torch.autograd.backward, torch.manual_seed, torch.random.manual_seed = kept[:3]
            torch.set_rng_state(kept[3])
            Trainer.__init__, Trainer.step = methods


RELAXED = """
import torch, hocket
model = torch.nn.Linear(2, 1)
plan = hocket.Plan(synchronisation="stale:4")
trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), plan)
trainer.step((torch.randn(4, 2), torch.randn(4, 1)))
"""


@pytest.mark.long
def test_relaxed_synchronisation_is_refused_with_the_reason(tmp_path, refusal):
    path = tmp_path / "relaxed.py"
    path.write_text(RELAXED)
    said = refusal(path, "-n", 2)
    assert "not serially equivalent" in said
    assert "may miss up to 4 updates" in said


RESUMING = """
import os, pathlib, torch, hocket
torch.manual_seed(0)
inputs = torch.tensor([float(line) for line in open("data/numbers.txt")])[:, None]
model = torch.nn.Linear(1, 1)
if os.path.exists("checkpoint.pt"):
    model.load_state_dict(torch.load("checkpoint.pt"))
loader = torch.utils.data.DataLoader(inputs, batch_size=4)
model, optimizer, loader = hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for x in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    if torch.distributed.get_rank() == 0:
        torch.save(model.state_dict(), "checkpoint.pt")
        pathlib.Path(__file__).with_name("log.txt").write_text("written by its absolute path")
"""


@pytest.mark.long
def test_a_run_does_not_find_what_the_other_wrote(checked, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "numbers.txt").write_text("\n".join(map(str, range(8))))
    (tmp_path / "resuming.py").write_text(RESUMING)
    monkeypatch.chdir(tmp_path)
    status, out, err = checked("resuming.py")
    assert status == 0, out + err
    assert not (tmp_path / "checkpoint.pt").exists()
    assert "warning: during the first run log.txt changed in this directory" in err


@pytest.mark.long
def test_compression_of_gradients_is_named_even_where_the_losses_agree(checked, script):
    flags = ("--tolerance", 0.5, "--", "--compression", "bf16")
    status, out, err = checked(script, "-n", 2, "--steps", 2, *flags)
    assert status == 0, err
    assert "Gradients are sent as bf16, which is not serially equivalent" in out
