"""What optimizers make for a moment, against the storages that are alive in a step of theirs."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.planner import Plan, memory_of
from hocket.sharding import leaves
from hocket.workload import Layer, Workload, WorkloadError, capture, parse


class _Lion(torch.optim.Optimizer):
    """A user's own: one tensor after the other, with a state that is made anew in each step."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                mean = self.state[one].setdefault("mean", torch.zeros_like(one))
                update = mean * 0.9 + one.grad * 0.1
                one.add_(update.sign(), alpha=-group["lr"])
                self.state[one]["mean"] = mean * 0.99 + one.grad * 0.01


class _AliveStoragesMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, there: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, int] = {}
        self.most = 0
        for one in there:
            self.note(one)

    def note(self, one: torch.Tensor) -> None:
        storage = one.untyped_storage()
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self.sizes.pop, storage._cdata)
            self.most = max(self.most, sum(self.sizes.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in leaves(out):
            if isinstance(one, torch.Tensor):
                self.note(one)
        return out


BATCH = torch.randn(4, 64), torch.randint(0, 10, (4,))


def loss(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch[0]), batch[1])


def network(*, bias: bool = True) -> nn.Module:
    sizes = ((64, 256), (256, 256), (256, 256), (256, 10))
    return nn.Sequential(*(one for size in sizes for one in (nn.Linear(*size, bias=bias), nn.ReLU())))


def alive(model: nn.Module, optimizer: Any) -> int:
    """Return the bytes of all storages at the fullest moment of a step, the second one or later."""

    def step() -> None:
        loss(model, BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    kept = [one for state in optimizer.state.values() for name, one in state.items() if name != "step"]
    mode = _AliveStoragesMode([*model.parameters(), *(one for one in leaves(kept) if isinstance(one, torch.Tensor))])
    del kept
    with mode:
        step()
    return mode.most


TOGETHER = {"foreach": True}
SINGLY = {"foreach": False}
NAMES = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop")
CASES: list[tuple[Any, dict[str, Any], float]] = [
    *((getattr(torch.optim, name), TOGETHER, 0.01) for name in NAMES),
    *((getattr(torch.optim, name), SINGLY, 0.03) for name in NAMES),
    (torch.optim.SGD, TOGETHER | {"momentum": 0.9}, 0.01),
    (torch.optim.SGD, TOGETHER | {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, 0.01),
    (torch.optim.Adam, TOGETHER | {"weight_decay": 0.1}, 0.01),
    (torch.optim.Adam, TOGETHER | {"amsgrad": True, "maximize": True}, 0.01),
    (torch.optim.Adam, {"fused": True}, 0.01),
    (torch.optim.RMSprop, TOGETHER | {"centered": True, "momentum": 0.9}, 0.01),
    (torch.optim.Adafactor, {}, 0.03),
    (torch.optim.Adafactor, TOGETHER, 0.01),
    (torch.optim.Muon, {}, 0.03),
    (_Lion, {}, 0.03),
]


@pytest.mark.parametrize(
    ("kind", "settings", "off"), CASES, ids=[f"{kind.__name__}-{'-'.join(map(str, more))}" for kind, more, _ in CASES]
)
def test_the_peak_is_that_of_the_storages_alive(kind: Any, settings: dict[str, Any], off: float) -> None:
    torch.manual_seed(0)
    model = network(bias=kind is not torch.optim.Muon)
    found = capture(
        model, BATCH, loss=loss, device="meta", optimizer=lambda parameters: kind(parameters, lr=1e-3, **settings)
    )
    said = memory_of(Plan().resolve(1), found, batch=4).total
    measured = alive(model, kind(model.parameters(), lr=1e-3, **settings))
    assert measured * 0.995 <= said <= measured * (1 + off), (said / measured, found.update_values)


def of_two(values: float | None, *singles: float) -> Workload:
    """A workload of layers that hold nothing but state, and little activations, so that the update is the fullest."""
    layers = (Layer(f"l{at}", "x", 10, 40, 40, 40, peak_bytes=1.0, update_bytes=one) for at, one in enumerate(singles))
    return Workload("w", 4, tuple(layers), update_values=values)


def working(workload: Workload, plan: Plan | None = None, workers: int = 1, rank: int | None = None) -> float:
    return memory_of((plan or Plan()).resolve(workers), workload, batch=4, rank=rank).working


def test_a_rank_makes_values_of_what_it_updates() -> None:
    assert working(of_two(2.0, 0.0, 0.0)) == 160  # of both
    assert working(of_two(0.0, 30.0, 90.0)) == 90  # of the largest
    assert working(of_two(1.0, 30.0, 90.0)) == 170
    stages = Plan(pipeline_parallel_degree=2, micro_batches=4)
    first, last = (memory_of(stages.resolve(2), of_two(0.0, 30.0, 90.0), batch=4, rank=rank) for rank in range(2))
    assert (first.total, last.total) == (40 * 3 + 30, 40 * 3 + 90)
    one, two = (
        memory_of(Plan(shard="optimizer").resolve(2), of_two(values, 0.0, 0.0), batch=4) for values in (0.0, 4.0)
    )
    assert two.total - one.total >= 4 * 80 / 2 - 40  # half of them; a gradient as it arrives is gone by then


def test_of_an_update_that_a_workload_says_nothing_of_adam_s_state_tells() -> None:
    assert working(of_two(None, 0.0, 0.0)) <= 1
    adam = tuple(dataclasses.replace(one, optimizer_bytes=80) for one in of_two(None, 0.0, 0.0).layers)
    assert working(Workload("w", 4, adam)) == 80
    assert working(Workload("w", 4, adam, update_values=0.0)) <= 1  # fused, say


def test_a_tensor_group_has_its_part_of_the_largest_tensor() -> None:
    model = network()
    found = capture(model, BATCH, loss=loss, device="meta", degrees=(2,), optimizer=_Lion)
    alone, two = (working(found, Plan(tensor_parallel_degree=degree), degree) for degree in (1, 2))
    assert alone / 2 <= two < alone * 0.6


def test_what_an_update_makes_is_in_the_text_of_a_workload() -> None:
    found = of_two(1.5, 0.0, 7.0)
    assert parse(str(found)) == found
    assert "\nupdate_values 1.5\n" in str(found)
    old = str(of_two(None, 0.0, 0.0))
    assert "update_values" not in old
    assert parse(old).update_values is None
    for wrong in ("-1", "nan", "inf"):
        with pytest.raises(WorkloadError, match=f"update_values '{wrong}' is not a finite number of 0 or more"):
            parse(str(found).replace("update_values 1.5", f"update_values {wrong}"))
    with pytest.raises(WorkloadError, match="write numbers for batch, optimizer_s, update_passes, update_values and"):
        parse(str(found).replace("update_values 1.5", "update_values much"))


def test_optimizers_that_go_by_the_device_are_told_from_others() -> None:
    """Adafactor takes all parameters at a time only where it is told to; Adam does by itself on a GPU."""
    for kind, values in ((torch.optim.Adafactor, 0), (torch.optim.Adam, 1), (type("Own", (torch.optim.Adam,), {}), 1)):
        found = capture(network(), BATCH, loss=loss, device="meta", optimizer=kind)
        assert found.update_values == values
        assert any(layer.update_bytes for layer in found.layers) == (not values)
    for name, values in (("sgd", 0), ("momentum", 0), ("adam", 1)):
        assert capture(network(), BATCH, loss=loss, device="meta", optimizer=name).update_values == values
