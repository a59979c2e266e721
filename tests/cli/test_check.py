import json
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import hocket

parser = argparse.ArgumentParser()
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--adam", action="store_true")
parser.add_argument("--no-hocket", action="store_true")
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
if options.no_hocket:
    torch.manual_seed(int(__import__("os").environ["RANK"]))
else:
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)
for epoch in range(options.epochs):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
print("trained")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("check") / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def _check(*arguments):
    command = [sys.executable, "-m", "hocket", "check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(("n", "flags"), [(3, []), (4, ["--adam"])])
def test_a_data_set_that_does_not_divide_learns_the_same(script, n, flags):
    result = _check(script, "-n", n, "--steps", 18, "--json", "--", *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["equivalent"]
    assert len(found["one"]) == len(found["several"]) == 18
    assert found["worst"] < 1e-5
    assert found["one"][-1] < found["one"][0]


def test_dropout_is_found_and_named(script):
    result = _check(script, "-n", 2, "--", "--dropout", "0.5", "--epochs", "1")
    assert result.returncode == 1
    assert "Not equivalent" in result.stdout
    assert "dropout draws other masks" in result.stdout


def test_a_script_without_distribute_is_told_so(script):
    result = _check(script, "-n", 2, "--", "--no-hocket", "--epochs", "1")
    assert result.returncode == 1
    assert "never calls hocket.distribute" in result.stdout


def test_a_failing_script_shows_its_traceback(script):
    result = _check(script, "-n", 2, "--", "--dropout", "7")
    assert result.returncode == 2
    assert "dropout probability has to be between 0 and 1" in result.stderr


def test_bad_input_is_named(tmp_path):
    result = _check(tmp_path / "none.py")
    assert result.returncode == 2
    assert "there is no script" in result.stderr
    empty = tmp_path / "empty.py"
    empty.write_text("print('nothing')")
    result = _check(empty)
    assert result.returncode == 2
    assert "made no backward pass" in result.stderr
