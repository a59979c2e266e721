import io
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from hocket.testing import deadline
from hocket.workloads import Follower, RunDirectory, conclude, report
from hocket.workloads._progress import clock

CONFIG = {"workload": "edsr", "unit": {"samples": "images", "name": "images", "per_sample": 1}}


def new_run(path: Path, steps: int = 20) -> RunDirectory:
    return RunDirectory.create(path / "run", CONFIG | {"settings": {"steps": steps, "workers": 2}})


def metric(run: RunDirectory, step: int, **other: Any) -> None:
    values = {"loss": 0.0123, "samples": step * 16, "elapsed_s": step * 0.1, "samples_per_s": 160.0, "left_s": 61.4}
    run.metric(step=step, **{**values, **other})


def plain() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=100), text


def test_plain_lines_are_few_and_the_last_step_is_among_them(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    console, text = plain()
    with Follower(run, console):
        for step in range(1, 21):
            metric(run, step)
        run.event("evaluating")
    assert text.getvalue().splitlines() == [
        "step 1/20  loss 0.0123  160 images/s  1:01 left",
        "step 20/20  loss 0.0123  160 images/s  1:01 left",
        "judging the model ...",
    ]


def test_a_terminal_gets_a_bar_that_moves_while_the_run_goes_on(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    with Follower(run, console):
        metric(run, 10)
        deadline_s = time.monotonic() + deadline(10)
        while "step 10/20" not in text.getvalue():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
    assert "1:01 left" in text.getvalue()


def test_a_loss_that_is_no_number_can_be_shown(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    console, text = plain()
    with Follower(run, console):
        metric(run, 1, loss=float("nan"))
    assert "loss nan" in text.getvalue()


def test_an_interrupted_run_is_reported_as_far_as_it_came(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    metric(run, 7)
    console, text = plain()
    report(conclude(run, "interrupted"), console)
    assert "Throughput: 160 images/s (112 images in 7 steps, 0:01)." in text.getvalue()
    assert "Interrupted" in text.getvalue()
    assert str(run.path) in text.getvalue().replace("\n", "")


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    console, text = plain()
    report(conclude(run, "failed", "rank 1: killed by SIGKILL"), console)
    assert "Failed: rank 1: killed by SIGKILL" in text.getvalue()


PLACEMENT = {
    "workers": 2,
    "device": "CPU",
    "gpus": 0,
    "cores": "1 core of its own",
    "threads": 1,
    "exclusive_cores": True,
    "cores_in_all": 2,
    "parameters": 121_987,
    "bucket_bytes": 121_987,
}
SCALING = {
    "samples_per_worker": 8,
    "workers": 2,
    "efficiency": 0.951,
    "efficiency_lowest": 0.94,
    "efficiency_highest": 0.96,
    "samples_per_s": 160.0,
    "one_samples_per_s": 84.1,
    "idle_core_share": 0.004,
    "rounds": 3,
    "steps_per_block": 10,
}


def test_what_was_not_held_fair_is_said(tmp_path: Path) -> None:
    """Workers that share cores, or a GPU, are not compared with one that has as much as each of them."""
    run = new_run(tmp_path)
    shared = {"exclusive_cores": False, "cores_in_all": 1, "cores": "1 thread on 1 core shared by all workers"}
    gpu = {"gpus": 1, "device": "GPU"}
    run.event("started", **{**PLACEMENT, **shared, **gpu})
    run.event("scaled", **SCALING)
    console, text = plain()
    report(conclude(run, "finished"), console)
    shown = " ".join(text.getvalue().split())
    assert "2 workers on 1 x GPU, 1 thread on 1 core shared by all workers." in shown
    assert "fewer cores than workers: the one alone had a core to itself, and the 2 shared 1. " in shown
    assert "The efficiency could not be above 50.0%." in shown
    assert "The 2 workers share 1 GPU; the one had it to itself." in shown


def test_everything_that_is_known_is_reported(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.event("started", **PLACEMENT)
    run.event("trained", steps=20, samples=320, training_s=2.0, samples_per_s=160.0, loss=0.1)
    run.event(
        "evaluated",
        title="PSNR",
        columns={"photograph": "photograph", "edsr_dB": "EDSR (dB)"},
        rows=[{"photograph": "cat", "edsr_dB": 34.567}],
        mean={"edsr_dB": 34.567},
        summary="better than before",
    )
    run.event("scaled", **SCALING)
    run.event(
        "profiled",
        bins=[
            {
                "kind": "all_reduce",
                "bin": "up to 128 KB",
                "count": 80,
                "nbytes": 9_758_960,
                "time_s": 0.0123,
                "exposed_s": 0.0011,
                "skew_s": 0.0002,
                "algbw_Bps": 0.79e9,
                "busbw_Bps": 0.79e9,
            }
        ],
        hidden_share=0.91,
        communication_s=0.0123,
        exposed_s=0.0011,
    )
    run.event("compressed", method="int8:256", verdict="int8:256 pays on this link.")
    console, text = plain()
    report(conclude(run, "finished"), console)
    shown = " ".join(text.getvalue().split())
    for expected in (
        "edsr, 121,987 parameters; 2 workers on CPU, 1 core of its own each.",
        "cat 34.57",
        "better than before.",
        "Scaling efficiency: 95.1% (94.0% to 96.0% in 3 rounds): 2 workers 160 images/s, one alone 84.1.",
        "Each of the 2, and the one alone, had 1 core of its own. A worker's share of a step was ",
        "One worker and all 2 took turns, 10 steps each. ",
        "Workers that waited for their turn used at most 0.4% of a core.",
        "all_reduce up to 128 KB 80 9.76 12.3 1.10 0.20 0.79 0.79",
        "Hidden behind back-propagation: 91.0% of 0.01 s of communication. Training waited for 0.00 s.",
        "Compression, which is not serially equivalent: int8:256 pays on this link.",
    ):
        assert expected in shown


def test_times_for_people() -> None:
    assert [clock(s) for s in (0.4, 59.6, 3725)] == ["0:00", "1:00", "1:02:05"]
