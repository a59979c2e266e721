"""What optimizers keep and move, seen in steps of made-up parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hocket.calibrate._references import maker_of
from hocket.workload import Update, WorkloadError, capture, optimizer_maker

FORMS = ((48, 32), (32,), ())


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(form)) for form in FORMS]


NBYTES = sum(one.numel() * 4 for one in parameters())
# Times the parameters' bytes that are kept, and read and written by kernels for all tensors (`foreach`).
KNOWN = [
    ("SGD", {}, 0, 3),
    ("SGD", {"momentum": 0.9}, 1, 8),
    ("Adam", {}, 2, 19),
    ("AdamW", {}, 2, 21),
    ("Adam", {"amsgrad": True}, 3, 22),
    ("RMSprop", {}, 1, 14),
    ("Adagrad", {}, 1, 14),
    ("Adadelta", {}, 2, 29),
]


@pytest.mark.parametrize(("name", "settings", "states", "passes"), KNOWN)
def test_torch_s_optimizers_are_counted(name: str, settings: dict[str, Any], states: int, passes: float) -> None:
    kind = getattr(torch.optim, name)
    own = parameters()
    made = kind(own, **{"lr": 0.1, **settings})
    before = len(made.state)  # Adagrad has it from the beginning
    for found in (Update.of(optimizer_maker(kind, **settings), own), Update.of(maker_of(made), own)):
        assert sum(map(found.state_bytes, own)) == states * NBYTES
        assert found.passes == pytest.approx(passes, rel=0.01)
    assert len(made.state) == before
    assert all(one is other for one, other in zip(made.param_groups[0]["params"], own, strict=True))


def test_state_that_is_factored_is_counted_as_it_is() -> None:
    own = parameters()
    found = Update.of(optimizer_maker(torch.optim.Adafactor), own)  # which asks for values, and so is run in memory
    real = torch.optim.Adafactor(own)
    for one in own:
        one.grad = torch.ones_like(one)
    real.step()  # type: ignore[no-untyped-call]
    for one in own:
        kept = [value for key, value in real.state[one].items() if isinstance(value, torch.Tensor) and key != "step"]
        assert found.state_bytes(one) == sum(value.numel() * 4 for value in kept)


def test_a_model_is_captured_with_its_optimizer() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    model[0].requires_grad_(False)
    for device in ("meta", "cpu"):
        found = capture(model, torch.zeros(4, 32), device=device, optimizer=torch.optim.RMSprop, degrees=(2,))
        assert [layer.optimizer_bytes for layer in found.layers] == [layer.gradient_bytes for layer in found.layers]
        last = found.layers[-1]
        assert 0 < last.share(2).optimizer_bytes < last.optimizer_bytes
    assert capture(model, torch.zeros(4, 32), device="meta", optimizer=torch.optim.RMSprop).update_passes == 14


class _Own(torch.optim.Optimizer):
    """One of a user's own, with state in half precision and settings that groups say."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                state.setdefault("kept", torch.zeros_like(one, dtype=torch.bfloat16))
                one.sub_(one.grad * group["lr"])


def test_an_optimizer_of_one_s_own_is_counted_and_stays_as_it_is() -> None:
    own = parameters()
    made = _Own([{"params": own[:1], "lr": 0.1}, {"params": own[1:], "lr": 0.2}], lr=1.0)
    found = Update.of(maker_of(made), own)
    assert sum(map(found.state_bytes, own)) == NBYTES // 2
    assert made.calls == 0
    assert not made.state
    assert [len(group["params"]) for group in made.param_groups] == [1, 2]


def test_what_takes_no_step_is_told_by_its_name_or_refused() -> None:
    own = parameters()
    assert maker_of(torch.optim.LBFGS(own)) == "sgd"
    with pytest.raises(WorkloadError, match=r"no step on a parameter of shape \(48, 32\): TypeError"):
        Update.of(optimizer_maker(torch.optim.LBFGS), own)
    with pytest.raises(WorkloadError, match="SGD has no setting 'speed'; it has params, lr"):
        optimizer_maker(torch.optim.SGD, speed=1)
    with pytest.raises(WorkloadError, match="'lamb' is not one of sgd, momentum, adam, and no function"):
        Update.of("lamb", own)


def test_parameters_without_a_shape_are_refused_with_the_remedy() -> None:
    model, sample = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 2)), torch.zeros(4, 16)
    with pytest.raises(WorkloadError, match=r"parameter 0\.weight has no shape yet; call the model once before"):
        capture(model, sample)
    model(sample)
    assert capture(model, sample, device="meta").parameters == 8 * 16 + 8 + 2 * 8 + 2
