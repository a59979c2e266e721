"""The loss in a calibration: which losses are run, on which made-up targets, and what their memory is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hocket.calibrate._loss import LossOfSample, changes_nothing, loss_by_made_up_targets, with_loss
from hocket.parallel.compose._passes import loss_of_model
from hocket.parallel.pipeline import in_steps
from hocket.workload import capture

_SEEN: list[float] = []
_WEIGHT = torch.ones(7)
_CALLS = 0


def over_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), label_smoothing=0.1)


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def weighted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target, weight=_WEIGHT)


def in_two(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return over_tokens(output, target) * target.numel(), target.numel()


def remembered(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    _SEEN.append(1.0)
    return squares(output, target)


def counted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    global _CALLS
    _CALLS += 1
    return squares(output, target)


def printed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    print("a loss")
    return squares(output, target)


def in_place(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    _WEIGHT.add_(1.0)
    return squares(output, target)


def through_another(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return remembered(output, target)


def counting() -> Callable[..., Any]:
    calls = 0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return squares(output, target)

    return loss


class _Metered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return squares(output, target)


def seeded(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return squares(output, target)


def dropped(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return squares(functional.dropout(output, 0.5), target)


CLASSES, MAPS, TOKENS, NUMBERS = (2, 7), (2, 7, 5, 4), (2, 6, 7), (2, 3, 4)


class _Gives(nn.Module):
    """A layer whose output has a form, and with it the input, whatever the number of samples."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale, self.shape = nn.Parameter(torch.ones(())), shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize(
    ("loss", "shape", "target"),
    [
        (functional.cross_entropy, CLASSES, (torch.long, (2,))),
        (nn.CrossEntropyLoss(weight=torch.ones(7)), CLASSES, (torch.long, (2,))),
        (weighted, CLASSES, (torch.long, (2,))),
        (nn.NLLLoss(), CLASSES, (torch.long, (2,))),
        (functional.cross_entropy, MAPS, (torch.long, (2, 5, 4))),
        (over_tokens, TOKENS, (torch.long, (2, 6))),
        (in_two, TOKENS, (torch.long, (2, 6))),
        (lambda o, y: functional.cross_entropy(o.transpose(1, 2), y), TOKENS, (torch.long, (2, 6))),
        (functional.mse_loss, NUMBERS, (torch.float32, NUMBERS)),
        (partial(functional.huber_loss, delta=0.5), NUMBERS, (torch.float32, NUMBERS)),
        (nn.BCEWithLogitsLoss(), (2, 1), (torch.float32, (2, 1))),
        (nn.BCEWithLogitsLoss(), CLASSES, (torch.float32, CLASSES)),
        (squares, NUMBERS, (torch.float32, NUMBERS)),
    ],
)  # fmt: skip
def test_a_target_is_told_from_the_output(
    loss: Any, shape: tuple[int, ...], target: tuple[torch.dtype, tuple[int, ...]]
) -> None:
    given: list[Any] = []
    x = torch.rand(shape) - 2.0  # as log-likelihoods are
    found, why = loss_by_made_up_targets(loss, _Gives(shape), (x,))
    assert found is not None, why

    class _Looking(torch.overrides.TorchFunctionMode):  # the target is among what torch's functions are given
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given.extend(one for one in args if isinstance(one, torch.Tensor))
            return func(*args, **(kwargs or {}))

    with _Looking():
        value = found(x.requires_grad_(), (x,))
    assert value.numel() == 1
    assert value.requires_grad
    assert target in [(one.dtype, tuple(one.shape)) for one in given]


@pytest.mark.parametrize(
    "loss",
    [seeded, remembered, counted, printed, in_place, through_another, counting(), _Metered(), _Metered().forward],
)
def test_a_loss_that_may_change_what_is_outside_is_not_run(loss: Any) -> None:
    before = len(_SEEN), _CALLS, _WEIGHT.sum().item()
    assert not changes_nothing(loss)
    found, why = loss_by_made_up_targets(loss, _Gives(NUMBERS), (torch.rand(NUMBERS),))
    assert found is None
    assert "change" in why
    assert (len(_SEEN), _CALLS, _WEIGHT.sum().item()) == before


def test_what_wants_a_target_of_its_own_form_is_not_run() -> None:
    def of_boxes(output: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        return (output - target["boxes"]).abs().mean()

    found, why = loss_by_made_up_targets(of_boxes, _Gives(NUMBERS), (torch.rand(NUMBERS),))
    assert found is None
    assert "target" in why


def test_of_keywords_the_batch_is_the_target_and_a_model_may_have_its_own_loss() -> None:
    class _Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 5)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layer(x)
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    batch = {"x": torch.rand(4, 3), "labels": torch.zeros(4, dtype=torch.long)}
    own, _ = loss_by_made_up_targets(loss_of_model, _Own(), batch)
    assert own is not None
    assert own({"loss": torch.tensor(3.0)}, batch) == 3.0
    given, _ = loss_by_made_up_targets(
        lambda out, b: functional.cross_entropy(out["logits"], b["labels"]), _Own(), batch
    )
    assert given is not None
    assert given(_Own()(**batch), batch).requires_grad


def test_a_language_models_loss_keeps_what_a_capture_with_real_targets_says() -> None:
    torch.manual_seed(0)
    vocabulary = 4096
    model = nn.Sequential(nn.Embedding(vocabulary, 16), nn.Linear(16, 16), nn.Linear(16, vocabulary))
    tokens = torch.randint(vocabulary, (4, 32))
    plain = in_steps(capture(model, tokens, degrees=(2,)), model, (tokens,))
    real = capture(
        model, tokens, degrees=(2,), loss=lambda own, batch: over_tokens(own(batch), torch.zeros_like(batch))
    )
    loss, _ = loss_by_made_up_targets(over_tokens, model, (tokens,))
    assert loss is not None
    found = with_loss(plain, model, (tokens,), loss, "adam")
    logits = 4 * tokens.numel() * vocabulary
    assert found.layers[-1].peak_bytes >= plain.layers[-1].peak_bytes + logits
    for mine, wanted, before in zip(found.layers, real.layers, plain.layers, strict=True):
        assert mine.peak_bytes == pytest.approx(wanted.peak_bytes, rel=0.01)
        assert [one.saved_bytes for one in mine.operations] == [one.saved_bytes for one in wanted.operations]
        assert [one.peak_bytes for one in mine.shares] == pytest.approx([one.peak_bytes for one in wanted.shares])
        assert mine.forward_s >= before.forward_s
        assert mine.backward_s >= before.backward_s
    assert found.layers[-1].forward_s > plain.layers[-1].forward_s
    assert found.finer[-1].forward_s > plain.finer[-1].forward_s
    assert all(parameter.grad is None for parameter in model.parameters())


def test_random_numbers_that_a_loss_draws_are_put_back() -> None:
    model, x = nn.Sequential(nn.Linear(6, 5)), torch.rand(4, 6)
    plain = capture(model, x, degrees=())
    before = torch.get_rng_state()
    loss, _ = loss_by_made_up_targets(dropped, model, (x,))
    assert loss is not None
    with_loss(plain, model, (x,), loss, "adam")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("named", [False, True])
def test_a_loss_of_model_and_sample_keeps_what_a_capture_with_it_says(named: bool) -> None:
    torch.manual_seed(0)
    vocabulary = 4096
    model = nn.Sequential(nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary))
    sample = {"tokens": torch.randint(vocabulary, (4, 32)), "labels": torch.randint(vocabulary, (4, 32))}

    def loss(model: Any, sample: Any) -> torch.Tensor:
        out = model(input=sample["tokens"]) if named else model(sample["tokens"])
        return over_tokens(out, sample["labels"]) + 0.1 * model[1].weight.square().sum()

    own = LossOfSample(loss, model, sample)
    inputs = own.inputs()
    assert (inputs["input"] if named else inputs[0]) is sample["tokens"]
    assert own(model(sample["tokens"][:2]), (sample["tokens"][:2],)).item() == pytest.approx(
        loss(model, {name: one[:2] for name, one in sample.items()}).item()
    )
    found, _ = loss_by_made_up_targets(own, model, inputs)
    assert found is own
    plain = capture(model, sample["tokens"], degrees=())
    real = capture(model, sample, loss=loss, degrees=())
    made = with_loss(plain, model, inputs, own, "adam")
    assert made.layers[-1].peak_bytes == pytest.approx(real.layers[-1].peak_bytes, rel=0.01)
    assert made.layers[-1].peak_bytes > plain.layers[-1].peak_bytes


def test_a_loss_that_does_not_call_the_model_once_is_told() -> None:
    model, x = nn.Linear(3, 3), torch.rand(4, 3)
    with pytest.raises(ValueError, match="calls the model 2 times"):
        LossOfSample(lambda model, x: (model(x) - model(x + 1)).sum(), model, x).inputs()
