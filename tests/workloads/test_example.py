"""Every bundled workload in its small size: what a comparison of ways to train can rely on."""

import pytest
import torch
from torch import fx

from hocket.workloads import SettingsError, example, names


@pytest.mark.parametrize("name", names())
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
