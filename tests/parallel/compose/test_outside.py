"""What a program does to a model or its optimizer past the Trainer: done as on one device, or refused."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.planner import Plan, PlanError
from hocket.testing import run_ranks

PLANS = {
    "data": Plan(),
    "optimizer": Plan(shard="optimizer"),
    "gradients": Plan(shard="gradients"),
    "parameters": Plan(shard="parameters"),
    "tensor": Plan(tensor_parallel_degree=2),
    "pipeline": Plan(pipeline_parallel_degree=2, micro_batches=2, split=("2",)),
}
PARTS = ("parameters", "tensor", "pipeline")  # where no rank has the whole model
X = torch.linspace(-1, 1, 8 * 16, dtype=torch.float64).view(8, 16)
Y = torch.linspace(0, 1, 8 * 8, dtype=torch.float64).view(8, 8)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).double()


def _other_data(model: Any, _: Any) -> None:
    model[2].weight.data = torch.linspace(-0.1, 0.1, 64 * 64, dtype=torch.float64).view(64, 64)


def _pickled(model: Any, _: Any) -> None:
    torch.save(model, io.BytesIO())


def _saved(model: Any, _: Any) -> None:
    """Write a file, as transformers' method of this name does."""

    def save_pretrained() -> None:
        model.state_dict()

    save_pretrained()


def _traced(model: Any, _: Any) -> None:
    torch.jit.trace(model, X)


def _scripted(model: Any, _: Any) -> None:
    torch.jit.script(model)


def _failed(model: Any, _: Any) -> None:
    """Have a forward fail before it begins; parameters are read after it as before."""

    def fail(*_: Any) -> None:
        raise ValueError("no")

    handle = model.register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(ValueError, match="no"), torch.no_grad():
        model(X)
    handle.remove()
    assert all(one.is_leaf for one in model.parameters())


def _moved(model: Any, _: Any) -> None:
    model.to(X.device, X.dtype)
    model.eval().train()


def _swapped(model: Any, _: Any) -> None:
    """Have other weights for an evaluation, as averages of weights do, by writing into them."""
    kept = {name: one.detach().clone() for name, one in model.named_parameters()}
    with torch.no_grad():
        for one in model.parameters():
            one.data.copy_(one.data * 0.9)
        model(X)
        for name, one in model.named_parameters():
            one.data.copy_(kept[name])


def _in_place(model: Any, _: Any) -> None:
    with torch.no_grad():
        model[2].weight.mul_(0.5)


def _replaced(model: Any, _: Any) -> None:
    model[2] = nn.Linear(64, 64).double()


def _hooked(model: Any, _: Any) -> None:
    model[2].weight.register_hook(lambda gradient: gradient * 0)


def _own_step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(X), Y).backward()
    optimizer.step()


def _state_made(model: Any, optimizer: Any) -> None:
    """Have the optimizer make its state by a step that changes nothing, as torch's distributed checkpoints do."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _loaded(model: Any, _: Any) -> None:
    model.load_state_dict({name: 1.5 * one for name, one in _model().state_dict().items()})


def _scheduled(_: Any, optimizer: Any) -> None:
    torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1).step()


def _clipping(model: Any, optimizer: Any) -> None:
    def clip(*_: Any) -> None:
        nn.utils.clip_grad_value_(
            model.parameters(), 0.001
        )  # torch calls hooks twice where super().step is hooked, too

    optimizer.register_step_pre_hook(clip)


def _clamping(_: Any, optimizer: Any) -> None:
    def clamp(optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.clamp_(-0.05, 0.05)

    clamp.elementwise = True  # type: ignore[attr-defined]
    optimizer.register_step_post_hook(clamp)


def _copied(model: Any, _: Any) -> None:
    """Have a copy of other weights give its own output, as averages of weights do."""
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        for one in twin.parameters():
            one.zero_()
        assert not twin(X).any()


class _Wrapped(torch.optim.SGD):
    elementwise = True

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


ACTS: dict[str, Callable[[Any, Any], None]] = {
    "other data": _other_data, "in place": _in_place, "replaced": _replaced, "hooked": _hooked, "own step": _own_step,
    "state made": _state_made, "loaded": _loaded, "scheduled": _scheduled,
    "moved": _moved, "swapped": _swapped, "clipping": _clipping, "clamping": _clamping, "copied": _copied,
    "pickled": _pickled, "saved": _saved, "traced": _traced, "scripted": _scripted, "failed": _failed,
}  # fmt: skip
# They change nothing for the steps to come: one training does them all, one after another.
HARMLESS = ("moved", "swapped", "copied", "pickled", "saved", "traced", "scripted", "failed")


def _trained(plan: Plan | None, *acts: str) -> list[float]:
    model = _model()
    optimizer = _Wrapped(model.parameters(), 0.1, momentum=0.9)
    if plan is None:

        def step() -> float:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(X), Y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return float(loss.detach())

    else:
        trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=X)

        def step() -> float:
            return float(trainer.step((X, Y)))

    losses = [step(), step()]
    for act in acts:
        ACTS[act](model, optimizer)
        losses.append(step())
    return losses + [step(), step()]


def _each(name: str, trainings: list[tuple[str, ...]]) -> list[list[float] | str]:
    found: list[list[float] | str] = []
    for acts in trainings:
        try:
            found.append(_trained(PLANS[name], *acts))
        except RuntimeError as error:
            found.append(str(error))
    return found


REFUSED = {
    ("optimizer", "hooked"): "no rank has this gradient as a whole",
    ("gradients", "hooked"): "no rank has this gradient as a whole",
    ("parameters", "hooked"): "no rank has this gradient as a whole",
    ("parameters", "other data"): "parameter '2.weight' was given other data",
    ("parameters", "loaded"): "trainer.load_state_dict(state, or a file) takes whole weights",
    ("tensor", "loaded"): "trainer.load_state_dict(state, or a file) takes whole weights",
    ("pipeline", "loaded"): "trainer.load_state_dict(state, or a file) takes whole weights",
    ("parameters", "copied"): "a model with sharded parameters cannot be copied",
    **{(name, "pickled"): "cannot be pickled: save trainer.state_dict()" for name in PARTS},
    **{
        (name, act): "load trainer.state_dict(), or a file of trainer.save_model"
        for name in PARTS
        for act in ("traced", "scripted")
    },
    **{(name, "saved"): "call trainer.save_model(folder) on every rank" for name in PARTS},
    ("pipeline", "copied"): "a copy of a model in a pipeline has the weights of this rank's stages alone",
    **{(name, "clipping"): "say clip_norm in the plan" for name in PLANS if name != "data"},
    ("tensor", "other data"): "shapes cannot be multiplied",
    **{(name, "replaced"): "is another than when the Trainer was made" for name in PLANS},
    ("pipeline", "own step"): "is trained by trainer.step",
    **{(name, "own step"): "take hocket.distribute(model, optimizer, loader)" for name in PLANS if name != "pipeline"},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PLANS)
def test_what_is_done_past_the_trainer_counts_or_is_refused(name: str) -> None:
    together = tuple(act for act in HARMLESS if (name, act) not in REFUSED)
    trainings = [together, *((act,) for act in ACTS if act not in together)]
    found, _ = run_ranks(_each, 2, name, trainings, timeout_s=110)
    for acts, losses in zip(trainings, found, strict=True):
        if (said := REFUSED.get((name, acts[0]))) is not None:
            assert isinstance(losses, str), acts
            assert said in losses, acts
        else:
            assert losses == pytest.approx(_trained(None, *acts), rel=1e-10), acts


def _compiled(names: list[str]) -> list[tuple[list[float], bool | str]]:
    """Return, by each plan, losses of a compiled step, and if the compiled model gives what it gives uncompiled."""
    found: list[tuple[list[float], bool | str]] = []
    for name in names:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, PLANS[name], sample=X)
        step = torch.compile(trainer.step, backend="eager")
        losses = [float(step((X, Y))) for _ in range(3)]
        with torch.no_grad():
            try:
                found.append((losses, torch.equal(torch.compile(trainer.model, backend="eager")(X), trainer.model(X))))
            except RuntimeError as error:
                found.append((losses, str(error)))
    return found


@pytest.mark.long
def test_a_step_or_model_that_is_compiled_runs_as_it_is_or_is_refused() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(X), Y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    for found in run_ranks(_compiled, 2, ["data", "pipeline", "tensor"], timeout_s=110):
        for ours, _ in found:
            assert ours == pytest.approx(losses, rel=1e-10)
        assert found[0][1] is True
        assert found[1][1] is True
        assert "torch.compile cannot read tensors of which every rank has a part" in str(found[2][1])


def _each_rank_loads(name: str, states: list[dict[str, Any]] | None) -> Any:
    """Return the optimizer's state dict, or what is said of rank 0's on every rank: loaded before, and after."""
    rank = torch.distributed.get_rank()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, PLANS[name], sample=X)
    trainer.step((X, Y))
    if states is None:
        if name in ("tensor", "pipeline"):
            with pytest.warns(UserWarning, match="has what one rank holds: trainer.state_dict"):
                model.state_dict()
        return optimizer.state_dict()
    optimizer.load_state_dict(states[rank])
    trainer.step((X, Y))
    after = before = ""
    try:
        optimizer.load_state_dict(states[1 - rank])
    except ValueError as error:
        after = str(error)
    plain = torch.optim.SGD(_model().parameters(), 0.1, momentum=0.9)
    try:
        plain.load_state_dict(states[0])
        hocket.Trainer(_model(), nn.functional.mse_loss, plain, PLANS[name], sample=X)
    except ValueError as error:
        before = str(error)
    return before, after


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["optimizer", "parameters", "tensor", "pipeline"])
def test_the_optimizers_state_of_one_rank_is_not_taken_for_anothers(name: str) -> None:
    states = run_ranks(_each_rank_loads, 2, name, None)
    for rank, (before, after) in enumerate(run_ranks(_each_rank_loads, 2, name, states)):
        assert "has the shape" in before or "doesn't match the size of optimizer's group" in before
        assert f"state of rank {1 - rank} of 2 alone" in after


def _trained_later(name: str, way: str) -> str:
    """Return the error of a step after the middle layer has been thawed, or added to the optimizer."""
    model = _model()
    model[2].requires_grad_(False)
    first = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(first if way == "added" else model.parameters(), 0.1)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, PLANS[name], sample=X)
    trainer.step((X, Y))
    if way == "added":
        optimizer.add_param_group({"params": list(model[2].parameters())})
    else:
        model[2].requires_grad_(True)
    with pytest.raises(RuntimeError) as caught:
        trainer.step((X, Y))
    return str(caught.value)


def _thawed_again(name: str, layer: int) -> tuple[list[float], list[float]]:
    """Return losses of a layer that is frozen after the Trainer was made, and thawed; and those of a plain loop."""
    found = []
    for plan in (PLANS[name], None):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = plan and hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=X)
        losses = []
        for step in range(4):
            model[layer].requires_grad_(step % 2 == 1)
            if trainer is not None:
                losses.append(float(trainer.step((X, Y))))
                continue
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(X), Y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
        found.append(losses)
    return found[0], found[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["data", "optimizer", "gradients", "parameters", "tensor", "pipeline"])
def test_what_is_trained_only_after_the_trainer_was_made_is_refused(name: str) -> None:
    for ranks in (1, 2) if name == "data" else (2,):
        assert "'2.weight' was frozen when the Trainer was made" in run_ranks(_trained_later, ranks, name, "thawed")[0]
        assert "(add_param_group), which knows nothing of them" in run_ranks(_trained_later, ranks, name, "added")[0]
    for layer in (2, 0):  # with a pipeline, the first stage has no other layer than the latter
        for mine, plain in run_ranks(_thawed_again, 2, name, layer):
            assert mine == pytest.approx(plain, rel=1e-10)


def _regrouped(way: str) -> dict[str, tuple[list[float], list[float]] | str]:
    """Return losses where a parameter changes or leaves its group, with a plain loop's, by plan; or the error."""
    found: dict[str, tuple[list[float], list[float]] | str] = {}
    plans = {name: PLANS[name] for name in ("data", "optimizer", "gradients", "parameters", "tensor", "pipeline")}
    for name, plan in {"plain": None, **plans, "priority": Plan(priority=True)}.items():
        model = _model()
        groups = [{"params": list(model[0].parameters()), "lr": 0.02}, {"params": list(model[2:].parameters())}]
        optimizer = torch.optim.SGD(groups, 0.1)
        losses: list[float] = []
        try:
            trainer = plan and hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=X)
            for step in range(6):
                if step == 3:  # the fuller group: that of a stage's rank is another
                    other, fuller = sorted(optimizer.param_groups, key=lambda group: len(group["params"]))
                    taken = fuller["params"].pop()
                    if way == "moved":
                        other["params"].append(taken)
                if trainer is not None:
                    losses.append(float(trainer.step((X, Y))))
                    continue
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(X), Y)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(float(loss.detach()))
            if trainer is None:
                plain = losses
            found[name] = losses, plain
        except (RuntimeError, PlanError) as error:
            found[name] = str(error)
    return found


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["moved", "taken out"])
def test_parameters_that_change_groups_train_as_in_one_process_or_are_refused(way: str) -> None:
    for found in run_ranks(_regrouped, 2, way):
        for name in ("data", "parameters", "tensor"):
            assert found[name][0] == pytest.approx(found[name][1], rel=1e-10)
        for name in ("optimizer", "gradients", "pipeline", "priority"):
            assert "moved between the optimizer's groups, or taken out of them" in found[name]
    assert not isinstance(run_ranks(_regrouped, 1, way)[0]["optimizer"], str)  # one process has nothing to share


def _what_is_said(name: str) -> tuple[list[str], list[str]]:
    """Return what is warned of where the program writes to a parameter, and errors of a replaced module's model."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, PLANS[name], sample=X)
    trainer.step((X, Y))
    trainer.load_state_dict(_model().state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.step((X, Y))
        assert not caught
        for _ in range(2):
            with torch.no_grad():
                model[2].weight.mul_(0.5)
            trainer.step((X, Y))
    warned = [str(one.message) for one in caught if "has written to parameter" in str(one.message)]
    model[2] = nn.Linear(64, 64).double()
    errors = []
    asks = (
        lambda: trainer.step((X, Y)), lambda: trainer.evaluate([(X, Y)]), lambda: trainer.predict(X),
        trainer.state_dict, lambda: trainer.save("nowhere"), lambda: trainer.load_state_dict({}),
    )  # fmt: skip
    for ask in asks:
        with pytest.raises(RuntimeError, match="another than when the Trainer was made") as error:
            ask()
        errors.append(str(error.value))
    return warned, errors


@pytest.mark.parametrize("name", PLANS)
def test_parts_that_are_written_to_are_told_of_and_replaced_parameters_refused(name: str) -> None:
    (warned, errors), (others, _) = run_ranks(_what_is_said, 2, name)
    assert len(warned) == (name in PARTS)
    assert not others
    assert all("'2.weight'" in one for one in warned)
    assert len(errors) == 6
    assert all(("'2'" if name == "pipeline" else "'2.weight'") in one for one in errors)
    if name == "data":
        run_ranks(_what_is_said, 1, name)


def _late_hooks(name: str) -> list[str]:
    """Return what is said of hooks on gradients that the program registers once a step is made."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, PLANS[name], sample=X)
    trainer.step((X, Y))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.step((X, Y))
        for one in model.parameters():
            one.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-3))
        for _ in range(2):
            trainer.step((X, Y))
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("name", ["data", "tensor", "pipeline"])
def test_hooks_that_see_parts_of_gradients_are_told_of_when_they_come_late(name: str) -> None:
    warned, others = run_ranks(_late_hooks, 2, name)
    assert len(warned) == (name != "data")
    assert not others
    assert all("'0.weight', which by this plan sees" in one for one in warned)


def _numbers_of_gradients(name: str) -> tuple[list[str], list[float], list[float], bool]:
    """Return what is said of norms that are read after a step, the losses with reading and without, and the types."""
    losses: list[list[float]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for reads in (True, False):
            model = _model()
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, PLANS[name], sample=X)
            losses.append([])
            for _ in range(3):
                losses[-1].append(float(trainer.step((X, Y))))
                gradients = [one.grad for one in model.parameters() if one.grad is not None]
                kept = pickle.loads(pickle.dumps([*copy.deepcopy(gradients), *(one.clone() for one in gradients)]))
                if reads:
                    _ = [float(one.data.norm(2)) for one in gradients]
                    _ = float(torch.cat([one.flatten() for one in gradients]).norm())
                    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                    model.zero_grad(set_to_none=name == "tensor")
                    nn.functional.mse_loss(model(X), Y).backward()
                    _ = [float((one.grad**2).sum()) for one in model.parameters() if one.grad is not None]
                    model.zero_grad()
    return [str(one.message) for one in caught], *losses, all(type(one) is torch.Tensor for one in kept)


@pytest.mark.parametrize("name", ["data", "optimizer", "tensor"])
def test_norms_of_gradients_of_which_a_rank_has_a_part_are_told_of(name: str) -> None:
    (warned, *losses, plain), (others, *_) = run_ranks(_numbers_of_gradients, 2, name)
    assert losses[0] == losses[1]
    assert plain
    # One for each line. Where states alone are sharded, what the program back-propagates itself is whole.
    assert len(warned) == {"data": 0, "optimizer": 3, "tensor": 4}[name]
    assert not others
    assert all("of a gradient of which this rank has a part alone" in one for one in warned)


def _numbers_of_weights(name: str) -> tuple[list[str], list[float], list[float], set[str]]:
    """Return what is said of numbers of weights, the losses with reading and without, and the classes of copies."""
    losses: list[list[float]] = []
    copies: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for reads in (True, False):
            model = _model()
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
            trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, PLANS[name], sample=X)
            losses.append([])
            before = [one.detach().clone() for one in model.parameters()]
            for _ in range(3):
                losses[-1].append(float(trainer.step((X, Y))))
                trainer.predict(X, targets=False)
                whole = trainer.state_dict()
                if not reads:
                    continue
                weights = list(model.parameters())
                _ = [one.norm().item() for one in weights]
                _ = sum(one.pow(2).sum() for one in weights).item()
                _ = [(one.data - old).abs().mean().item() for one, old in zip(weights, before, strict=True)]
                _ = torch.cat([one.flatten() for one in weights]).abs().kthvalue(9)
                _ = (nn.utils.parameters_to_vector(weights).abs() < 1e-3).sum().item()
                gradients = torch.autograd.grad(nn.functional.mse_loss(model(X), Y), weights, create_graph=True)
                _ = sum(one.square().sum() for one in gradients).item()
                _ = sum((one * one.detach()).sum() for one in gradients).item()
                # None of these is a number of a part.
                _ = [bool(torch.isfinite(one).all()) and one.numel() for one in weights]
                _ = [float(one.norm()) for one in whole.values()]
                repr(weights)
                average = torch.optim.swa_utils.AveragedModel(model)
                average.update_parameters(model)
                copied = [copy.copy(weights[0]), nn.Parameter(weights[0]), nn.Parameter(weights[0].data)]
                copies = [*copied, *copy.deepcopy(weights), *pickle.loads(pickle.dumps(weights))]
                copies += [*copy.deepcopy(model).parameters(), *average.parameters(), *whole.values()]
        copies += copy.deepcopy(model.state_dict()).values()
    return [str(one.message) for one in caught], *losses, {type(one).__qualname__ for one in copies}


@pytest.mark.parametrize("name", ["data", "gradients", "tensor"])
def test_numbers_of_weights_of_which_a_rank_has_a_part_are_told_of(name: str) -> None:
    (warned, *losses, classes), (others, *_) = run_ranks(_numbers_of_weights, 2, name)
    assert losses[0] == losses[1]
    assert classes == {"Parameter", "Tensor"}
    told = [one for one in warned if "of which this rank has a part alone" in one]
    assert len(told) == (7 if name == "tensor" else 0)  # one for each line
    assert sum("trainer.state_dict(), called on every rank, has whole weights" in one for one in told) == 5 * bool(told)
    assert not any("of which this rank has a part alone" in one for one in others)


def _looks_for_gradients(name: str) -> tuple[list[int], list[float], bool]:
    """Return how much was said after each look for gradients, their norms, and whether other parameters are plain."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, PLANS[name], sample=X)
    told, norms = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def look() -> None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
            told.append(sum("(shard = 'gradients') none is kept" in str(one.message) for one in caught))

        def look_again() -> None:
            norms.extend(float(one.grad.norm()) for one in model.parameters() if one.grad is not None)
            told.append(sum("(shard = 'gradients') none is kept" in str(one.message) for one in caught))

        look()  # by any plan there are none yet
        trainer.step((X, Y))
        model.zero_grad()
        look()
        trainer.step((X, Y))
        model.double()(X)
        torch.jit.script(model)
        torch.export.export(model, (X,))
        told.append(sum("none is kept" in str(one.message) for one in caught))  # these look for none
        look()
        look()
        model.zero_grad()
        look_again()
        nn.functional.mse_loss(model(X), Y).backward()
        look_again()
        trainer.step((X, Y))
        look_again()
    kept = [*copy.deepcopy(model).parameters(), *pickle.loads(pickle.dumps(list(model.parameters())))]
    return told, norms, all(type(one) is nn.Parameter for one in kept)


@pytest.mark.parametrize("name", ["data", "gradients"])
def test_a_look_for_gradients_that_the_step_has_freed_is_told_of(name: str) -> None:
    (told, _, plain), (others, *_) = run_ranks(_looks_for_gradients, 2, name)
    assert told == ([0, 0, 0, 1, 1, 1, 1, 2] if name == "gradients" else [0] * 8)
    assert not any(others)
    assert plain
