"""The summary of a run, made from what stands in its directory."""

from typing import Any

from hocket.workloads._run import RESULT, RunDirectory

# Events that carry a part of the result, and its name there.
_PARTS = {
    "started": "placement",
    "trained": "training",
    "profiled": "communication",
    "compressed": "compression",
    "evaluated": "quality",
    "scaled": "scaling",
}


def conclude(run: RunDirectory, status: str, error: str | None = None) -> dict[str, Any]:
    """Write the result of a run that has ended one way or another, from what is known of it.

    Args:
        run: The run.
        status: "finished", "interrupted" or "failed".
        error: What went wrong.

    Returns:
        The result: "status", "error", "run" (the directory), "config", "training", and as far as the run came
        "placement", "quality", "scaling", "communication", "compression" and "picture" (its path).
    """
    config = run.config
    result: dict[str, Any] = {"status": status, "error": error, "run": str(run.path), "config": config}
    metrics = run.metrics()
    if metrics:
        last = metrics[-1]
        result["training"] = {
            "steps": last["step"],
            "samples": last["samples"],
            "training_s": last["elapsed_s"],
            "samples_per_s": last["samples_per_s"],
            "loss": last["loss"],
        }
    for event in run.events():
        if event["event"] in _PARTS:
            result[_PARTS[event["event"]]] = {k: v for k, v in event.items() if k not in ("event", "time_s")}
    if run.picture.exists():
        result["picture"] = str(run.picture)
    run.write(RESULT, result)
    return run.result() or result
