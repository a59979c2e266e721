"""What the recorder heard in some steps, as a timeline."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import hocket
from hocket.planner import Plan, check_run
from hocket.profile import Recorder, timeline_of
from hocket.profile._timeline import difference
from hocket.testing import run_ranks
from hocket.timeline import Timeline, covered_s, from_perfetto, to_perfetto

intervals = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: (float(min(pair)), float(max(pair))))


@given(intervals, st.lists(intervals, max_size=6))
def test_a_difference_is_what_others_leave(whole: tuple[float, float], holes: list[tuple[float, float]]) -> None:
    left = difference(whole, holes)
    assert left == sorted(left)
    assert all(begin < end for begin, end in left)
    assert covered_s(left) == covered_s([whole, *holes]) - covered_s(holes)
    assert covered_s([*left, *holes]) == covered_s(left) + covered_s(holes)


def test_without_steps_there_is_an_empty_timeline() -> None:
    assert timeline_of(Recorder(), []) == Timeline("run")


def trained(plan: Plan) -> tuple[Timeline, dict[str, object]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    predicted = Plan(**{**vars(plan), "predicted": {"step_s": 1.0, "compute_s": 0.75, "gradients_s": 0.25}})
    sample = torch.ones(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, optimizer, predicted, sample=sample)
    for _ in range(7):
        trainer.step((torch.ones(8, 64), torch.ones(8, 64)))
    dist.barrier()
    return trainer.timeline(), trainer.report()["prediction"]


def test_a_trainer_tells_where_its_steps_went_and_what_was_predicted() -> None:
    for plan in (Plan(), Plan(pipeline_parallel_degree=2, micro_batches=2)):
        (timeline, prediction), (other, _) = run_ranks(trained, 2, plan)
        assert timeline == other
        assert timeline.ranks == (0, 1)
        assert from_perfetto(to_perfetto(timeline)).ranks == (0, 1)
        for rank in (0, 1):
            assert {span.name for span in timeline.of(rank, "compute")} == {"step"}
            assert len(timeline.of(rank, "compute")) >= 5  # not the two that warm up
            assert timeline.of(rank, "collective")
            assert 0 < timeline.busy_s(rank, "compute") <= timeline.seconds
        checked = check_run(Plan(predicted={"step_s": 1.0}), timeline, steps=5)
        measured = {part: seconds for part, _, seconds in checked.rows}
        parts = measured["computation"] + measured["exposed communication"] + measured["idle"]
        assert parts == pytest.approx(measured["step"])
        rows = {row["part"]: row for row in prediction["parts"]}
        assert rows["step"]["predicted_s"] == 1.0
        assert prediction["error"] == pytest.approx(1 / rows["step"]["measured_s"] - 1)
        assert prediction["communication_s"]


def test_what_happens_between_steps_is_not_part_of_a_step() -> None:
    """A loop that evaluates for longer than it trains is not called slower than predicted."""
    heard = Recorder()
    for gap in (0.0, 5.0):
        steps = [(10.0 + index * (1 + gap), 11.0 + index * (1 + gap)) for index in range(5)]
        checked = check_run(Plan(predicted={"step_s": 1.0}), timeline_of(heard, steps), steps=5)
        assert checked.error == pytest.approx(0)
