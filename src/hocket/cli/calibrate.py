"""`hocket calibrate`: the ranks measure themselves and a model; what they find is kept for `plan="auto"`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ._output import RANKS, bad_input


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
) -> None:
    """Measure a model and the ranks that are to train it, keep that for plan="auto", and choose a plan.

    The sample is the inputs of a global batch. Ranks have the threads that `hocket run` gives them.
    """
    import torch

    from hocket.launch import launch

    kind = getattr(torch.optim, optimizer, None)
    base = torch.optim.Optimizer
    if not (isinstance(kind, type) and issubclass(kind, base) and kind is not base):
        bad_input("calibrate", f"--optimizer: torch.optim has no {optimizer!r}; write AdamW, Adam or SGD")
    if ".py:" not in target:
        bad_input("calibrate", f"{target!r} names no function; write train.py:build, which returns (model, sample)")
    if not Path(file := target.rpartition(":")[0]).is_file():
        bad_input("calibrate", f"{target}: there is no file {file!r}")
    if out is not None and not out.absolute().parent.is_dir():
        bad_input("calibrate", f"--out {out}: there is no folder {out.absolute().parent}")
    spec = {"target": target, "optimizer": optimizer, "seconds": seconds, "out": str(out.absolute()) if out else None}
    env = {"HOCKET_CALIBRATION": "again"} if again else {}
    ended = launch(["hocket.cli.calibrate", json.dumps(spec)], n, flags=["-m"], env={**env, "HOCKET_RECORD": "off"})
    if ended.exit_code:
        raise typer.Exit(ended.exit_code)


def _rank(target: str, optimizer: str, seconds: float | None, out: str | None) -> None:
    import torch

    from hocket.calibrate import auto_plan
    from hocket.parallel.mesh import join
    from hocket.planner import PlanError

    from ._target import TargetError, built

    world = join()
    try:
        torch.manual_seed(0)
        model, sample, _ = built(target)
    except TargetError as error:
        if world.rank == 0:
            print(f"hocket calibrate: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
        plan = auto_plan(model, made, sample, world, seconds)
        if world.rank == 0 and out:
            Path(out).write_text(plan.to_toml(), encoding="utf-8")
    except (PlanError, OSError) as error:
        if world.rank == 0:
            print(f"hocket calibrate: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if world.rank == 0 and not out:
        print(plan.to_toml(), end="")


if __name__ == "__main__":
    _rank(**json.loads(sys.argv[1]))
