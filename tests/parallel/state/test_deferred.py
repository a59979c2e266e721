"""Models that are built without memory get the numbers of a plain construction, whatever part a rank holds."""

from __future__ import annotations

import copy
import functools
import operator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import hocket
from hocket.parallel.state import Deferred, _ledger
from hocket.planner import Plan
from hocket.testing import run_ranks

from .. import deferred_programs

SIDE = 132  # a matrix of float32 is just larger than what is made at once

STEPS: dict[str, Any] = {
    "normal": lambda t, o: t.normal_(0, 0.5),
    "uniform": lambda t, o: nn.init.kaiming_uniform_(t),
    "truncated": lambda t, o: nn.init.trunc_normal_(t, std=0.3),
    "orthogonal": lambda t, o: nn.init.orthogonal_(t),
    "rows": lambda t, o: t[3:7].normal_(),
    "padding": lambda t, o: t[2].fill_(0),
    "scaled": lambda t, o: t.mul_(0.5).add_(0.1),
    "copied": lambda t, o: t.copy_(o.t()),
    "itself": lambda t, o: t.copy_(t.detach()),
    "both": lambda t, o: t.addcmul_(o, o, value=0.1),
    "drawn": lambda t, o: t.add_(torch.randn(SIDE, SIDE) * 0.1),
    "one number": lambda t, o: t.add_(float(o.abs().max()) * torch.rand(1).item()),
    "generator": lambda t, o: t.normal_(generator=torch.Generator().manual_seed(4)),
    "replaced": lambda t, o: t.set_((o * 2 + torch.rand(SIDE, SIDE)).data),
}


class Program(nn.Module):
    """Does some steps to two parameters, each to one of them with the other beside it."""

    def __init__(self, steps: list[tuple[str, bool]]) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(SIDE, SIDE), nn.Embedding(SIDE, SIDE, padding_idx=5)
        self.scale = nn.Parameter(torch.randn(SIDE, SIDE) * torch.linspace(0, 1, SIDE))
        self.register_buffer("table", torch.outer(torch.arange(SIDE), torch.rand(SIDE)))
        with torch.no_grad():
            for name, swapped in steps:
                pair = self.one.weight, self.other.weight
                STEPS[name](*(reversed(pair) if swapped else pair))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.one(self.other(index) @ self.scale) + self.table[0] + self.one.weight.t()[0]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([name for name in STEPS if name != "replaced"]), st.booleans()), max_size=7),
    st.sampled_from([0, 2**25]),
)
@example([("copied", True), ("scaled", False)], 0)  # what another was made of is changed after that,
@example([("copied", True), ("normal", False), ("both", False)], 0)  # and then by that other
@example([("copied", False), ("copied", True)], 0)
@example([("both", False), ("both", True), ("both", False), ("both", True), ("copied", False)], 0)
def test_any_constructor_makes_the_same_numbers_and_leaves_the_same_random_numbers(
    steps: list[tuple[str, bool]], kept_nbytes: int
) -> None:
    with mock.patch.object(_ledger, "_KEPT_NBYTES", kept_nbytes):  # or all tensors are larger than what is kept
        same_numbers(steps)


def same_numbers(steps: list[tuple[str, bool]]) -> None:
    torch.manual_seed(3)
    plain, after = Program(steps), torch.rand(2)
    torch.manual_seed(3)
    model = hocket.deferred(Program, steps)
    assert torch.equal(after, torch.rand(2))
    names = {name for name, p in model.named_parameters() if p.is_meta}
    assert names == {"one.weight", "other.weight", "scale"}
    parameters, index = list(model.parameters()), torch.arange(9)
    held = Deferred.of(model)
    assert held is not None
    with held.streaming():
        found = model(index)
        found.sum().backward()
    plain(index).sum().backward()
    torch.testing.assert_close(found, plain(index), rtol=0, atol=0)
    held.finish()
    for name, expected in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], expected), name
    for one, other, kept in zip(model.parameters(), plain.parameters(), parameters, strict=True):
        assert one is kept
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


def _both(change: Any, steps: list[tuple[str, bool]]) -> tuple[nn.Module, nn.Module]:
    """Return a plain model that was changed, and a deferred one that was changed likewise and has its numbers now."""
    found = []
    for build in (Program, functools.partial(hocket.deferred, Program)):
        torch.manual_seed(3)
        model = build(steps)
        found.append(change(model) or model)
    held = Deferred.of(found[1])
    assert held is not None
    held.finish()
    assert all(type(one) is nn.Parameter for one in found[1].parameters())
    return found[0], found[1]


def _same(plain: nn.Module, found: nn.Module) -> None:
    for name, expected in plain.state_dict().items():
        assert torch.equal(found.state_dict()[name], expected), name
        assert found.state_dict()[name].dtype == expected.dtype, name


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted({*STEPS} - {"replaced"})), st.booleans()), max_size=3),
    st.lists(st.tuples(st.sampled_from(sorted({*STEPS} - {"replaced", "one number"})), st.booleans()), max_size=5),
)
def test_what_is_done_to_parameters_later_is_done_to_their_numbers(
    steps: list[tuple[str, bool]], later: list[tuple[str, bool]]
) -> None:
    def change(model: Any) -> None:
        with torch.no_grad():
            for name, swapped in later:
                pair = model.one.weight, model.other.weight
                STEPS[name](*(reversed(pair) if swapped else pair))

    _same(*_both(change, steps))


def _loaded(model: nn.Module) -> None:
    model.load_state_dict({name: torch.full_like(one, 0.25) for name, one in Program([]).state_dict().items()})


def _applied(model: nn.Module) -> None:
    def drawn(one: nn.Module) -> None:
        if isinstance(one, nn.Linear):
            nn.init.xavier_normal_(one.weight)

    torch.manual_seed(7)
    model.apply(drawn)


def _copied(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    return other


def _no_gradient(model: Any, change: Any) -> None:
    with torch.no_grad():
        change(model)


def _and_back(module: nn.Module) -> None:
    parametrize.remove_parametrizations(module, "weight")


CHANGES: dict[str, Any] = {
    "loaded": _loaded,
    "applied": _applied,
    "copied": _copied,
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "double, then changed": lambda m: _no_gradient(m.double(), lambda o: o.one.weight.mul_(1.1)),
    "frozen": lambda m: m.requires_grad_(False) and None,
    "data": lambda m: m.one.weight.data.normal_(0, 0.1) is None or None,
    "view of data": lambda m: _no_gradient(m, lambda o: o.one.weight.data.t()[3:5].add_(1.0)),
    "detached": lambda m: m.one.weight.detach().view(-1)[7:].mul_(3.0) is None or None,
    "item": lambda m: _no_gradient(m, lambda o: o.one.weight.__setitem__(5, torch.arange(float(SIDE)))),
    "augmented": lambda m: _no_gradient(m, lambda o: operator.imul(o.one.weight, 2.0)),
    "parts": lambda m: _no_gradient(m, lambda o: [one.mul_(2.0) for one in o.one.weight.chunk(3)]),
    "all at once": lambda m: _no_gradient(m, lambda o: torch._foreach_mul_(list(o.parameters()), 0.5)),
    "its own state": lambda m: m.load_state_dict(m.state_dict()) and None,
    "out": lambda m: _no_gradient(m, lambda o: torch.mul(torch.ones(SIDE, SIDE), 0.1, out=o.one.weight)),
    "other data": lambda m: setattr(m.one.weight, "data", torch.full((SIDE, SIDE), 0.3)),
    "data of itself": lambda m: setattr(m.one.weight, "data", m.one.weight.data.t() * 0.5),
    "data of another": lambda m: setattr(m.one.weight, "data", m.other.weight.data.clone()),
    "each of itself": lambda m: m.one._apply(lambda one: one * 2) and None,
    "its own copy": lambda m: _no_gradient(m, lambda o: o.one.weight.copy_(o.one.weight.clone())),
    "its directions": lambda m: _no_gradient(m, lambda o: o.one.weight.div_(o.one.weight.norm(dim=1, keepdim=True))),
    "those below 0": lambda m: _no_gradient(m, lambda o: o.one.weight.__setitem__(o.one.weight < 0, 0.0)),
    "a number of its own": lambda m: _no_gradient(m, lambda o: o.one.weight.mul_(float(o.one.weight.mean()))),
    "another parameter": lambda m: setattr(m.one, "weight", nn.Parameter(m.one.weight.detach() * 2)),
    "the same numbers": lambda m: setattr(m.one, "weight", nn.Parameter(m.other.weight)),
    "one row": lambda m: setattr(m.one, "weight", nn.Parameter(m.one.weight.data[:1].expand(SIDE, -1).contiguous())),
    "beside others": lambda m: setattr(m.one, "weight", nn.Parameter(torch.cat([torch.ones(3, SIDE), m.one.weight]))),
    "its own state, doubled": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}) and None,
    "weight norm": lambda m: parametrizations.weight_norm(m.one) and None,
    "weight norm and back": lambda m: _and_back(parametrizations.weight_norm(m.one)),
    "spectral norm": lambda m: parametrizations.spectral_norm(m.one) and None,
    "pruned": lambda m: prune.l1_unstructured(m.one, "weight", amount=0.3) and None,
    "data of another type": lambda m: setattr(m.one.weight, "data", torch.full((SIDE, SIDE), 0.3, dtype=torch.float64)),
}  # fmt: skip


INITIALISERS: dict[str, dict[str, Any]] = {
    "uniform_": {},
    "normal_": {"std": 0.1},
    "trunc_normal_": {"std": 1.0},  # some are drawn again
    "trunc_normal_ far from its mean": {"mean": 3.0, "std": 0.5},
    "constant_": {"val": 0.5},
    "ones_": {},
    "zeros_": {},
    "eye_": {},
    "xavier_uniform_": {},
    "xavier_normal_": {},
    "kaiming_uniform_": {},
    "kaiming_normal_": {},
    "orthogonal_": {},
    "sparse_": {"sparsity": 0.5},
}
for _name, _values in INITIALISERS.items():
    _draw = getattr(nn.init, _name.split()[0])
    CHANGES[_name] = lambda m, draw=_draw, values=_values: draw(m.one.weight, **values) is None or None


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("error")
@pytest.mark.filterwarnings("ignore:mean is more than 2 std:UserWarning")
def test_a_deferred_model_is_changed_as_a_plain_one(name: str) -> None:
    _same(*_both(CHANGES[name], [("both", False)]))


def test_what_cannot_be_done_to_a_deferred_parameter_is_refused() -> None:
    model = hocket.deferred(Program, [])
    weight = model.one.weight
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        weight.mul_(2.0)
    with torch.no_grad():
        for change in (weight.copy_, lambda lost: setattr(weight, "data", lost)):
            with pytest.raises(RuntimeError, match="has numbers of other tensors that are not there"):
                change(torch.ones(SIDE, SIDE, device="meta"))
        with pytest.raises(RuntimeError, match="resize_ changes its memory"):
            weight.resize_(3)
        with pytest.raises(RuntimeError, match="changes several deferred parameters at once"):
            torch.linalg.qr(torch.rand(SIDE, SIDE), out=(weight, model.other.weight))
    for move in (lambda: model.to("cpu"), lambda: weight.cpu()):
        with pytest.raises(RuntimeError, match="build it on its device"):
            move()
    assert weight.is_meta
    assert isinstance(weight, nn.Parameter)
    held = weight * 2
    assert held.is_meta
    assert Deferred.of(model) is not None
    with pytest.raises(RuntimeError, match="make it again of the model's parameters"):
        held + 1


def test_what_only_one_rank_has_read_makes_no_other_model() -> None:
    models = [hocket.deferred(Program, []) for _ in range(2)]
    assert float((models[0].one.weight.detach() * 2).abs().sum()) > 0
    found = [Deferred.of(model)._ledgers[0].operators(list(model.parameters())) for model in models]
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_a_tensor_that_was_computed_with_gradients_and_kept_is_told() -> None:
    def build() -> nn.Module:
        return nn.utils.weight_norm(nn.Linear(200, 200))

    with pytest.raises(ValueError, match="parameter 'weight_v' cannot be deferred.*parametrizations.weight_norm"):
        hocket.deferred(build)


def test_what_is_no_model_or_has_lost_its_buffers_is_refused() -> None:
    with pytest.raises(TypeError, match="must build a torch.nn.Module"):
        hocket.deferred(lambda: torch.zeros(3))  # type: ignore[arg-type, return-value]
    with torch.device("meta"):
        model = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match=r"buffer 'running_mean' is on the meta device.*hocket.deferred"):
        hocket.Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters()))
    with torch.device("meta"):
        plain = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="has no memory yet"):
        hocket.Trainer(
            plain, nn.functional.mse_loss, torch.optim.SGD(plain.parameters()), "auto", sample=torch.rand(2, 3)
        )
    with pytest.raises(ValueError, match="on the meta device"):
        hocket.distribute(plain)
    model, _, _ = hocket.distribute(hocket.deferred(nn.Linear, 200, 200))  # type: ignore[assignment]
    assert not any(p.is_meta for p in model.parameters())


@functools.cache
def one_process() -> Any:
    return deferred_programs.plain()


def check(ranks: list[Any], plans: list[Plan]) -> None:
    expected, drawn = one_process()
    for rank, (found, function) in enumerate(ranks):
        assert function[0] == pytest.approx(expected[0], rel=1e-12)
        for number, (losses, random, meta, said, resumed, decay, same) in enumerate(found):
            assert losses == pytest.approx(expected, rel=1e-12), plans[number]
            assert meta
            assert same
            assert decay == [0.01, 0.0]
            assert resumed == pytest.approx(expected[2], rel=1e-12), plans[number]
            assert "nothing says what its weights are" in said
            if rank == 0 and not (plans[number].tensor_parallel_degree or 1) > 1:
                assert random == drawn


@pytest.mark.long
def test_every_plan_trains_a_model_that_no_rank_has_built(tmp_path: Path) -> None:
    plans = [
        Plan(),
        Plan(shard="parameters"),
        Plan(tensor_parallel_degree=2),
        Plan(pipeline_parallel_degree=2, micro_batches=2),
    ]
    check(run_ranks(deferred_programs.train, 2, plans, str(tmp_path), timeout_s=110), plans)


@pytest.mark.long
def test_two_axes_and_other_forms_do_so_too(tmp_path: Path) -> None:
    plans = [
        Plan(shard="optimizer"),
        Plan(tensor_parallel_degree=2, shard="parameters"),
        Plan(pipeline_parallel_degree=2, micro_batches=2, shard="gradients"),
        Plan(tensor_parallel_degree=2, pipeline_parallel_degree=2, micro_batches=2),
        Plan(embeddings="row"),
    ]
    check(run_ranks(deferred_programs.train, 4, plans, str(tmp_path), timeout_s=170), plans)
