"""What a loop decides by a number of its own samples, found in the program's text and told once."""

import math
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.parallel.data._decisions import decision
from hocket.testing import run_ranks


class Loss:
    """One that is 1.0, of a loop that trains nothing."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def backward(self) -> None:
        """Do nothing."""

    def __mul__(self, other: float) -> "Loss":
        return self


def _found(tmp_path: Path, body: str) -> list[str]:
    """What is decided by `loss.item()`, each time that a loop takes it; `body` is its text."""
    found: list[str] = []

    def item() -> float:
        found.append(decision())
        return 1.0

    code = item.__code__.replace(co_filename=torch.__file__)  # as the item() of a tensor
    of_torch = types.FunctionType(code, item.__globals__, closure=item.__closure__)
    lines = [f"        {line}" for line in body.strip().splitlines()]
    file = tmp_path / "loop.py"
    file.write_text("\n".join(["def train(loss, opt, g):", "    best, bad, total = 9.0, 0, 0.0", *BEGIN, *lines]))
    named = {"__name__": "__main__", "math": math, "hocket": types.SimpleNamespace(average=lambda one: one)}
    exec(compile(file.read_text(), str(file), "exec"), named)
    group = {"lr": 1.0}
    named["train"](Loss(of_torch), types.SimpleNamespace(step=lambda *_: None, param_groups=[group]), group)
    return [one for one in found if one]


BEGIN = ["    for _ in range(2):"]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("if loss.item() > 5: continue\nloss.backward()", "line 4: if loss.item() > 5: continue"),
        ("value = loss.item()\nif value > 5: continue\nloss.backward()", "line 5: if value > 5: continue"),
        ("loss.backward()\nif loss.item() < 5: opt.step()", "line 5: if loss.item() < 5: opt.step()"),
        ("loss = loss if loss.item() < 5 else loss * 0.1\nloss.backward()", "line 4: loss = loss if"),
        ("k = 1 if loss.item() < 5 else 0.1\nloss = loss * k\nloss.backward()", "line 4: k = 1 if loss.item() < 5"),
        ("if loss.item() < 0.1:\n    break\nloss.backward()", "line 4: if loss.item() < 0.1:"),
        ("if (v := loss.item()) > 1 and v < 5:\n    opt.step()", "line 4: if (v := loss.item()) > 1 and v < 5:"),
        ("loss.backward()\nif loss.item() < 5:\n    opt.param_groups[0]['lr'] *= 0.5", "line 5: if loss.item() < 5:"),
        ("total = 0.9 * total + 0.1 * loss.item()\nif 2 * total > 5: continue", "line 5: if 2 * total > 5: continue"),
        ("opt.last = loss.item()\nif opt.last > 5: break", "line 5: if opt.last > 5: break"),
        ("value, bad = loss.item(), 3\nif value > 5: break", "line 5: if value > 5: break"),
        ("opt.step(loss.item())", "line 4: opt.step(loss.item())"),
        ("total += loss.item()\nif total < 5: opt.step(total / 3)", "line 5: if total < 5: opt.step("),
        ("total += loss.item()\nopt.step(total / 3)", "line 5: opt.step(total / 3)"),
        ("while loss.item() > 5:\n    loss.backward()", "line 4: while loss.item() > 5:"),
        ("if bad < 5 and (not loss.item() < 5 or bad > 3): continue", "line 4: if bad < 5 and (not"),
        ("total += loss.item()\nif total > best: bad += 1\nif bad > 2: break", "line 6: if bad > 2: break"),
    ],
)
def test_what_a_number_decides_is_found(tmp_path: Path, body: str, line: str) -> None:
    assert any(one.startswith(line) for one in _found(tmp_path, body))


@pytest.mark.parametrize(
    "body",
    [
        "loss.backward()\nprint(loss.item())",
        "if loss.item() < best:\n    best = loss.item()\n    print(best)\nloss.backward()",
        "if not math.isfinite(loss.item()): continue\nloss.backward()",
        "value = loss.item()\nif math.isnan(value): continue\nloss.backward()",
        "if loss.item() == 0: continue\nloss.backward()",
        "value = hocket.average(loss.item())\nif value > 5: continue\nloss.backward()",
        "value = loss.item()\nvalue = hocket.average(value)\nif value > 5: continue\nloss.backward()",
        "if hocket.average(loss.item()) > 5: continue\nloss.backward()",
        "total += loss.item()\nif bad > 5: continue\nloss.backward()",
        "best = max(best, loss.item())\nloss.backward()",
        "assert loss.item() < 5\nloss.backward()",
        "g['loss'] = loss.item()\nif len(g) > 5: break\nloss.backward()",
        "g[bad] = loss.item()\nif bad > 5: break\nloss.backward()",
        "opt.last = loss.item()\nif opt.param_groups[0]['lr'] > 5: break\nloss.backward()",
        "opt.step(hocket.average(loss.item()))\nloss.backward()",
        "value = loss.item()\nopt.step(bad)\nloss.backward()",
        "value, bad = loss.item(), 3\nif bad > 5: break\nloss.backward()",
        "value = loss.item()\nif value < best:\n    best, bad = value, 0\n    print('saved')\nloss.backward()",
    ],
)
def test_what_a_number_does_not_decide_is_not_told(tmp_path: Path, body: str) -> None:
    assert _found(tmp_path, body) == []


def _train(how: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 8)
    model: Any = torch.nn.Linear(8, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x, x[:, :1]), batch_size=8)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    best = math.inf
    for inputs, target in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), target)
        if how == "item" and loss.item() > 50:
            continue
        if how == "tensor" and loss > 50:
            continue
        if how == "nan" and torch.isnan(loss):
            continue
        if how == "named" and torch.gt(input=loss, other=torch.tensor(50.0)):
            continue
        if how == "average" and hocket.average(loss) > 50:
            continue
        loss.backward()
        if how != "after" or loss.item() < 50:
            optimizer.step()
        best = min(best, loss.item())


def _told(how: str) -> list[str]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        _train(how)
    return [str(one.message) for one in warned if "the loop decides how it trains" in str(one.message)]


ASKED = {"item": "loss.item()", "tensor": "loss"}


@pytest.mark.parametrize("how", ["item", "tensor", "after", "average", "best", "nan", "named"])
def test_a_loop_that_decides_by_its_own_loss_is_told_on_one_rank(how: str) -> None:
    first, second = run_ranks(_told, 2, how)
    assert second == []
    if how in LINES:
        (said,) = first
        assert f"(line {LINES[how]}: if how " in said
        assert "decide by hocket.average of it" in said
    else:
        assert first == []


SOURCE = Path(__file__).read_text().splitlines()
LINES = {"after": 1 + SOURCE.index('        if how != "after" or loss.item() < 50:')} | {
    how: 1 + SOURCE.index(f'        if how == "{how}" and {asked} > 50:') for how, asked in ASKED.items()
}
