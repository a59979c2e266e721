"""`hocket calibrate`: the ranks measure themselves and a model; what they find is kept for `plan="auto"`."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from hocket._ends import with_end
from hocket._files import write_asked

from ._output import RANKS, Json, bad_input, check_place, print_json

if TYPE_CHECKING:
    from hocket.parallel.mesh import World


_LATE_S = 30.0


def calibrate(
    target: Annotated[str, typer.Argument(help="train.py:build, a function that returns the model and a sample.")],
    n: Annotated[int, typer.Option(*RANKS, min=2, help="Number of ranks on this host.")] = 2,
    optimizer: Annotated[str, typer.Option(help="Class of torch.optim that will train.")] = "AdamW",
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Measure about so long, less surely; one to two minutes if not given.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure though a calibration is kept.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the plan that is chosen into this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a model and the ranks that are to train it, keep that for plan="auto", and choose a plan.

    The sample is the inputs of a global batch. Ranks have the threads that `hocket run` gives them.
    """
    import torch

    from hocket.launch import launch
    from hocket.planner import Plan

    kind = getattr(torch.optim, optimizer, None)
    base = torch.optim.Optimizer
    if not (isinstance(kind, type) and issubclass(kind, base) and kind is not base):
        bad_input("calibrate", f"--optimizer: torch.optim has no {optimizer!r}; write AdamW, Adam or SGD")
    if ".py:" not in target:
        bad_input("calibrate", f"{target!r} names no function; write train.py:build, which returns (model, sample)")
    if not os.path.isfile(file := target.rpartition(":")[0]):
        bad_input("calibrate", f"{target}: there is no file {file!r}")
    check_place("calibrate", out, "--out ")
    env = {"HOCKET_RECORD": "off"} | ({"HOCKET_CALIBRATION": "again"} if again else {})
    with tempfile.TemporaryDirectory(prefix="hocket-calibrate-") as folder:
        written = out.absolute() if out is not None else Path(folder, "plan.toml") if as_json else None
        spec = {"target": target, "optimizer": optimizer, "seconds": seconds, "out": str(written) if written else None}
        command = ["hocket.cli.calibrate", json.dumps(spec)]
        ended = launch(command, n, flags=["-m"], env=env, stdout=sys.stderr.buffer if as_json else None)
        if ended.exit_code:
            raise typer.Exit(ended.exit_code)
        if as_json and written is not None:
            print_json({"plan": Plan.from_toml(written).to_json()})


def _rank(target: str, optimizer: str, seconds: float | None, out: str | None) -> None:
    import torch

    from hocket.calibrate import auto_plan
    from hocket.parallel.mesh import join
    from hocket.planner import PlanError

    from ._target import TargetError, built

    world = join()
    try:
        torch.manual_seed(0)
        model, sample, loss = built(target)
    except TargetError as error:
        _refuse(world, error)
    try:
        made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
        plan = auto_plan(model, made, sample, world, seconds, loss_of_sample=loss)
        if world.rank == 0 and out:
            write_asked(Path(out), with_end(plan.to_toml()))
    except (PlanError, OSError) as error:
        _refuse(world, error)
    if world.rank == 0 and not out:
        print(plan.to_toml(), end="")


def _refuse(world: "World", error: Exception) -> NoReturn:
    """End this rank with one error of the user's, said by the first that has one, and no traceback of ours below it."""
    from hocket.comm.torch_adapter import default_store

    if world.size > 1 and default_store().add("hocket/calibrate/refused", 1) > 1:
        time.sleep(_LATE_S)  # the first is saying it; when it has ended, the launcher ends the others
    print(f"hocket calibrate: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2)


if __name__ == "__main__":
    _rank(**json.loads(sys.argv[1]))
