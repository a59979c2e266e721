"""Every bundled workload in its small size: what a comparison of ways to train can rely on."""

from typing import Any

import pytest
import torch
from torch import fx

from hocket.testing import run_ranks
from hocket.workloads import SettingsError, build, example, names, settings_from_options


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name.startswith("resnet") else name for name in names()]
)
def test_it_learns_can_be_traced_and_is_the_same_every_time(name: str) -> None:
    found = example(name)
    (batch,) = found.batches(1)
    assert all(len(part) == found.batch_size for part in batch)
    again = example(name)
    assert all(torch.equal(a, b) for a, b in zip(batch, again.batches(1)[0], strict=True))
    weights = found.model.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in again.model.state_dict().items())

    optimizer, losses = found.optimizer(found.model), []
    for _ in range(60):
        optimizer.zero_grad()
        loss = found.loss_fn(found.model(*batch[:-1]), batch[-1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]

    traced = fx.symbolic_trace(found.model.eval())
    assert torch.equal(traced(*batch[:-1]), found.model(*batch[:-1]))


@pytest.mark.parametrize("name", names())
def test_the_loss_is_a_mean_over_samples(name: str) -> None:
    """Then parts of a batch, weighted by their samples, make up the whole; other losses could not be shared out."""
    found = example(name)
    *inputs, target = found.batches(1)[0]
    with torch.no_grad():
        output = found.model(*inputs)
        whole = found.loss_fn(output, target)
        parts = [found.loss_fn(output[here], target[here]) for here in (slice(0, 3), slice(3, None))]
    weights = [3, found.batch_size - 3]
    together = sum(loss * weight for loss, weight in zip(parts, weights, strict=True)) / found.batch_size
    torch.testing.assert_close(together, whole, rtol=1e-5, atol=1e-6)


def test_other_sizes_and_options_are_taken_as_hocket_train_takes_them() -> None:
    assert example("translation", language="german", batch_size=5).batch_size == 5
    with pytest.raises(SettingsError, match="--size huge"):
        example("language_model", "huge")


JUDGED = ("resnet101", "language_model", "translation", "recommender")


def _judge() -> list[dict[str, Any]]:
    found = []
    for name in JUDGED:
        options = {"synthetic": True} if name == "recommender" else {}
        workload = build(settings_from_options(name, {"workers": 1, "size": "tiny", **options}))
        torch.manual_seed(0)
        found.append(workload.evaluate(workload.model(), None))
    return found


@pytest.mark.long
def test_workers_judge_as_one_does_and_beside_something_simple() -> None:
    alone = _judge()
    for together in run_ranks(_judge, 2):
        for name, mine, expected in zip(JUDGED, together, alone, strict=True):
            assert mine["summary"] == expected["summary"], name
            assert list(mine["columns"])[0] in mine["rows"][0]
            for row, other in zip(mine["rows"], expected["rows"], strict=True):
                assert row == pytest.approx(other, abs=1e-3), name
