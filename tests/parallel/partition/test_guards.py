"""Programs that decide by data, sizes, modes, counters and random numbers are equal under a plan, or refused."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from hocket.parallel.pipeline import SplitError, split
from hocket.testing import run_ranks

from . import guard_programs as guards


def drawn(count: int) -> list[guards.Program]:
    """Return so many programs, the same ones always."""
    found: list[guards.Program] = []

    @settings(max_examples=count, deadline=None, database=None, derandomize=True, phases=(Phase.generate,),
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(guards.programs())
    def collect(program: guards.Program) -> None:
        found.append(program)

    collect()
    return found


def check(outcomes: list[str], programs: list[guards.Program]) -> Counter[str]:
    """Fail with the programs that are neither equal nor refused; return how many are what."""
    for outcome, program in zip(outcomes, programs, strict=True):
        assert outcome == "equal" or outcome.startswith("refused"), (program, outcome)
    return Counter(outcome.partition(":")[0] for outcome in outcomes)


def tensor(count: int) -> Counter[str]:
    programs = drawn(count)
    ranks = run_ranks(guards.tensor, 2, programs, timeout_s=60 + count)
    assert ranks[0] == ranks[1]  # refused alike, with one error
    return check(ranks[0], programs)


def test_what_is_rare_is_equal_or_refused_with_the_line() -> None:
    ranks = run_ranks(guards.reaching, 2, timeout_s=90)
    assert ranks[0] == ranks[1]
    assert ranks[0].pop("packed") == "equal"
    for word, outcome in ranks[0].items():
        if guards.WORDS[word]:
            assert outcome.startswith("ShardingError: "), (word, outcome)
            assert "guard_programs.py:" in outcome
            assert guards.WORDS[word] in outcome
        else:
            assert outcome == "equal", (word, outcome)


def test_programs_in_two_stages_are_equal_or_refused() -> None:
    programs = drawn(5)
    check([guards.pipeline(program) for program in programs], programs)


def test_an_attribute_that_code_reads_may_not_change_after_the_model_was_split() -> None:
    model = guards.Scaled()
    stages = split(model, 2, (torch.ones(2, 4),))
    model.title = "second"
    stages[0].settled.check()
    model.factor = 0.5
    with pytest.raises(SplitError, match=r"factor was 1\.0 when the model was split into stages and is 0\.5 now"):
        stages[0].settled.check()


def change_factors(model: guards.Settings) -> None:
    model.factors[1] = 0.5


def change_tensor(model: guards.Settings) -> None:
    model.scale.mul_(0.5)


def replace_tensor(model: guards.Settings) -> None:
    model.scale = torch.tensor(0.5)


def change_setting(model: guards.Settings) -> None:
    model.config.power = 3


def replace_settings(model: guards.Settings) -> None:
    model.config = SimpleNamespace(power=3)


def replace_function(model: guards.Settings) -> None:
    model.act = torch.relu


def replace_buffer(model: guards.Settings) -> None:
    model.mean = torch.ones(4)


def replace_forward(model: guards.Settings) -> None:
    model.forward = lambda x: model.b(x)  # type: ignore[assignment]


def add_hook(model: guards.Settings) -> None:
    model.register_forward_hook(lambda _, __, output: 2 * output)


def change_class(model: guards.Settings) -> None:
    model.__class__ = type("Other", (guards.Settings,), {})


CHANGES = [
    change_factors, change_tensor, replace_tensor, change_setting, replace_settings, replace_function, replace_buffer,
    replace_forward, add_hook, change_class,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_neither_may_lists_tensors_settings_and_code(change: Callable[[guards.Settings], None]) -> None:
    model = guards.Settings()
    stages = split(model, 2, (torch.ones(2, 4),))
    with torch.no_grad():
        model.a.weight.mul_(0.9)  # as an optimizer does
        model.mean.fill_(1.0)
    model.a.register_forward_hook(lambda _, __, output: 2 * output)  # which each step calls
    with torch.no_grad():
        stages[0].settled.check()
        change(model)
    with pytest.raises(SplitError, match="the model was split into stages"):
        stages[0].settled.check()


@pytest.mark.long
def test_200_programs_over_two_ranks_are_equal_or_refused() -> None:
    assert tensor(200)["equal"] >= 160


@pytest.mark.long
def test_200_programs_in_two_stages_are_equal_or_refused() -> None:
    programs = drawn(200)
    check([guards.pipeline(program) for program in programs], programs)
