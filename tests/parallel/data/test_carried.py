"""A loop that carries a recurrent network's state from batch to batch, and models that give a row for each step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hocket
from hocket.testing import run_ranks

_WORDS = 11


class Network(nn.Module):
    """As the language model of torch's examples: a row of the output for each step of each text, and the state."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(_WORDS, 6)
        self.layers = nn.LSTM(6, 5, 2, batch_first=batch_first)
        self.words = nn.Linear(5, _WORDS)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, state = self.layers(self.embed(x), state)
        return self.words(out).view(-1, _WORDS), state


def texts(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    x = torch.randint(_WORDS, (max(sizes), 5 * len(sizes) + 1), generator=draw)
    return [(x[:n, i * 5 : i * 5 + 5], x[:n, i * 5 + 1 : i * 5 + 6]) for i, n in enumerate(sizes)]


def trained(sizes: list[int], carries: bool) -> tuple[list[float], list[str]]:
    """Return sums of the weights, and what was told."""
    model: Any = Network().double()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    loader: Any = texts(sizes)
    if torch.distributed.is_initialized():
        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            state: tuple[Tensor, ...] | None = None
            for x, y in loader:
                if state is None or not carries:
                    state = (torch.zeros(2, len(x), 5, dtype=torch.float64),) * 2
                state = tuple(one.detach()[:, : len(x)].contiguous() for one in state)
                optimizer.zero_grad()
                out, state = model(x, state)
                cross_entropy(out, y.reshape(-1)).backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()
    return [float(one.detach().sum()) for one in model.parameters()], [str(one.message) for one in told]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("sizes", [[8, 8, 8, 8], [8, 8, 8, 5]])
@pytest.mark.parametrize("carries", [False, True])
def test_a_state_that_is_carried_is_that_of_one_process_where_batches_have_one_size(
    ranks: int, sizes: list[int], carries: bool
) -> None:
    """It was told of, in other words, in each case."""
    alone, _ = trained(sizes, carries)
    here, told = run_ranks(trained, ranks, sizes, carries, timeout_s=100)[0]
    if carries and sizes[-1] != sizes[0]:
        assert len(told) == 1
        assert "this batch has 5 samples, and not 8" in told[0]
        return
    assert told == []
    assert here == pytest.approx(alone, rel=1e-10)  # sums in another order


def trained_by_time() -> None:
    model: Any = Network(batch_first=False).double()
    model, _, loader = hocket.distribute(model, None, [(x.t().contiguous(), y.t().contiguous()) for x, y in texts([8])])
    for x, y in loader:
        out, _ = model(x, (torch.zeros(2, 8, 5, dtype=torch.float64),) * 2)
        cross_entropy(out, y.reshape(-1)).backward()  # type: ignore[no-untyped-call]


def test_texts_with_time_first_are_refused_though_the_output_is_flat() -> None:
    """Parts of each text were trained as if they were others: 1.3e-1 off."""
    with pytest.raises(Exception, match="take the batch as the second dimension"):
        run_ranks(trained_by_time, 2, timeout_s=100)
