"""`hocket compare`: two timelines or plans side by side, predicted or measured."""

import contextlib
import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._output import Json, bad_input, print_json

if TYPE_CHECKING:
    from hocket.planner import Plan
    from hocket.timeline import Timeline

_TRACES = ("trace.json", "timeline.json")


def compare(
    first: Annotated[Path, typer.Argument(help="A run's folder, a trace (--trace FILE), or a plan's .toml.")],
    second: Annotated[Path, typer.Argument(help="The same; a plan and a trace in either order.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps that a trace holds, when it is compared with a plan.")] = 1,
    as_json: Json = False,
) -> None:
    """Show two timelines side by side; or a plan's prediction beside what a run's timeline shows."""
    from hocket.planner import Plan, check_run
    from hocket.timeline import compare as side_by_side

    try:
        one, other = _load(first), _load(second)
        if isinstance(one, Plan) and isinstance(other, Plan):
            _plans(one, other, as_json)
            return
        if not isinstance(one, Plan) and not isinstance(other, Plan):
            found = side_by_side(one, other)
            programs = [_program(first), _program(second)]
            if as_json:
                print_json(asdict(found) | {"error": found.error, "programs": programs})
                return
            typer.echo(str(found))
            typer.echo(
                f"\n{second} takes {abs(found.error):.1%} {'longer' if found.error > 0 else 'less'} than {first}"
            )
            if all(programs) and programs[0] != programs[1]:
                differ = f"they ran {programs[0]!r} and {programs[1]!r}"
                typer.echo(f"{differ}: unless both train the same model alike, that says nothing of plans or networks")
            return
        plan, timeline = (one, other) if isinstance(one, Plan) else (other, one)
        assert isinstance(plan, Plan)
        assert not isinstance(timeline, Plan)
        checked = check_run(plan, timeline, steps=steps)
    except ValueError as error:
        bad_input("compare", error)
    if as_json:
        print_json(
            {
                "error": checked.error,
                "parts": [{"part": p, "predicted_s": a, "measured_s": b} for p, a, b in checked.rows],
                "communication_s": dict(checked.collectives),
            }
        )
        return
    typer.echo(str(checked))
    typer.echo(f"\nthe step was predicted {abs(checked.error):.1%} too {'long' if checked.error > 0 else 'short'}")


def _load(path: Path) -> "Plan | Timeline":
    from hocket.explain import timeline_of_run
    from hocket.planner import Plan
    from hocket.profile import read_run
    from hocket.timeline import TimelineError, read_perfetto

    if path.suffix == ".toml" and not path.is_dir():
        return Plan.from_toml(path)
    if path.is_dir():
        found = next((path / name for name in _TRACES if (path / name).is_file()), None)
        if found is None:
            run = read_run(path)
            return replace(timeline_of_run(run), name=(path if run.folder == path else run.folder.parent).name)
        path = found
    timeline = read_perfetto(path)
    if not timeline.seconds:
        raise TimelineError(f"{str(path)!r} holds nothing that takes time; name the trace of a step or of a run")
    return timeline


def _program(path: Path) -> str:
    """Return what a run's folder says was started, with its arguments; "" if it says nothing."""
    from hocket.profile import find_folder

    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        about = json.loads((find_folder(path).parent / "run.json").read_text())
        return shlex.join([about["target"], *about["arguments"]])
    return ""


def _plans(one: "Plan", other: "Plan", as_json: bool) -> None:
    """Show what two plans decide differently, and what is predicted of both."""
    values = [plan.to_json() for plan in (one, other)]
    differing = {
        name: [values[0][name], values[1][name]]
        for name in values[0]
        if name not in ("predicted", "reasons") and values[0][name] != values[1][name]
    }
    asked = [plan.reasons.get("for", "") for plan in (one, other)]  # model, batch, workers and cluster
    predicted = {}
    if one.predicted and other.predicted:  # where a part of a step is left out, it takes no time
        names = [name for name in {**one.predicted, **other.predicted} if name.endswith("_s")]
        names += [name for name in one.predicted if name in other.predicted and name not in names]
        predicted = {name: [plan.predicted.get(name, 0.0) for plan in (one, other)] for name in names}
    if as_json:
        print_json({"for": asked, "differing": differing, "predicted": predicted})
        return
    for plan, what in zip((one, other), asked, strict=True):
        typer.echo(plan.describe() + (f", for {what}" if what else ""))
    unlike = all(asked) and asked[0] != asked[1]
    typer.echo("they were made for different things: their times do not say which is better\n" if unlike else "")
    for name, (left, right) in differing.items():
        typer.echo(f"{name:28} {left!s:>20} {right!s:>20}")
    for name, (before, after) in predicted.items():
        typer.echo(f"{name:28} {before:>20.6g} {after:>20.6g}")
