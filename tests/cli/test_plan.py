"""`hocket plan`, `hocket predict` and `hocket compare`, as a user calls them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.cli import _beside, _target, main
from hocket.cli._output import print_json
from hocket.planner import Plan
from hocket.profile._layout import STEP
from hocket.profile._record import RankRecord
from hocket.workload import parse

Captured = pytest.CaptureFixture[str]


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    code = ended.value.code
    return code if isinstance(code, int) else 0


def run_json(capsys: Captured, *words: str) -> dict[str, Any]:
    assert run(*words, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_is_chosen_explained_and_written(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    assert run("plan", "gpt-7b", "-n", "16", "--cluster", "selene-like", "--batch", "64", "-o", str(file)) == 0
    said = capsys.readouterr().out
    plan = Plan.from_toml(file)
    assert plan.describe() in said
    assert "The runner-up is" in said
    assert "why not" in said
    assert plan.reasons["for"] == "gpt-7b, batches of 64, 16 workers of selene-like"
    assert plan.predicted["step_s"] > 0
    assert run("plan", "gpt-7b", "-n", "16", "--cluster", "selene-like", "--batch", "64", "--plan", str(file)) == 0
    assert plan.describe() in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["plan", "predict"])
def test_constants_are_read_before_a_model_is_measured(capsys: Captured, tmp_path: Path, verb: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('measured')")
    assert run(verb, f"{script}:build", "-n", "2", "--cluster", "closet", "--constant", "jitter=nan") == 2
    assert "jitter: nan is no number" in capsys.readouterr().err


def test_what_is_not_known_and_what_was_given_are_among_the_assumptions(capsys: Captured) -> None:
    """A curve on servers of unknown memory says so: "scales up to" 8 workers is no promise that it fits."""
    words = ["predict", "gpt-22b", "-n", "8", "--cluster", "star:hosts=8,bandwidth=10GB/s,server.flops=100TFLOP/s"]
    found = run_json(capsys, *words, "--constant", "kernel_s=2us")
    taken = {row["what"]: (row["value"], row["basis"]) for row in found["assumptions"]}  # type: ignore[attr-defined]
    assert taken["memory of each"] == ("no limit is known, so every plan fits", "unknown")
    assert taken["kernel_s"] == ("2us", "given")
    words += ["--constant", "matmul_share=0.5", "--constant", "jitter=0.02"]
    taken = {row["what"]: (row["value"], row["basis"]) for row in run_json(capsys, *words)["assumptions"]}  # type: ignore[attr-defined]
    assert taken["products"] == ("50% of 100 TFLOP/s in bfloat16", "given")
    assert taken["jitter"][1] == "assumed, in part given"
    assert not {"matmul_share", "host_jitter"} & taken.keys()  # told once
    large = run_json(capsys, *words[:4], "--cluster", "selene-like")
    assert "memory of each" not in {row["what"] for row in large["assumptions"]}  # type: ignore[attr-defined]


@pytest.mark.long
def test_a_narrow_terminal_gets_narrow_lines(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("plan", "gpt-1.7b", "-n", "8", "--cluster", "selene-like", "--batch", "32")
    monkeypatch.setenv("COLUMNS", "90")
    assert run(*words) == 0
    explanation, table = capsys.readouterr().out.split("\n\n")[:2]
    assert max(map(len, (explanation + "\n" + table).splitlines())) <= 90
    assert table.splitlines()[0].split() == ["plan", "step", "80%", "within", "exposed", "idle", "memory", "why", "not"]
    monkeypatch.delenv("COLUMNS")
    assert run(*words) == 0
    assert len(capsys.readouterr().out.splitlines()[0]) > 300


def test_hand_constraints_hold_and_json_holds_all(capsys: Captured) -> None:
    found = run_json(
        capsys,
        "plan",
        "gpt-1.7b",
        "-n",
        "8",
        "--cluster",
        "selene-like",
        "--batch",
        "32",
        "--tensor",
        "2",
        "--shard",
        "none",
    )
    chosen = found["chosen"]
    assert isinstance(chosen, dict)
    assert (chosen["tensor_parallel_degree"], chosen["shard"]) == (2, "none")
    assert {"ranked", "explanation", "considered"} <= found.keys()
    first = found["ranked"][0]  # type: ignore[index]
    parts = first["parts_s"]
    exposed = sum(parts[name] for name in ("tensor", "messages", "gather", "gradients"))
    assert first["exposed_s"] == pytest.approx(exposed)
    assert first["idle_share"] == pytest.approx((parts["bubble"] + parts["straggle"]) / first["step_s"])
    rows: Any = [*found["ranked"], *found["too_large"]]  # type: ignore[misc]
    assert len({row["describe"] for row in rows}) == len(rows)  # also where only what is computed again differs
    assert [row["why_not"] for row in rows].count("chosen") == 1


SELENE = ("--cluster", "selene-like")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt-7b", "-n", "8", "--cluster", "selene-like", "--tensor", "5"], "can be divided among 5 workers"),
        (
            ["gpt-7b", "-n", "8", "--cluster", "selene-like", "--memory", "1GiB"],
            "14 GiB on each of 8 workers if",
        ),
        (["gpt-9b", "-n", "8"], "there is no transformer 'gpt-9b'"),
        (["nothing", "-n", "8"], "there is no workload 'nothing'"),
        (["missing.py:build", "-n", "8"], "there is no file 'missing.py'"),
        (["transformer:hidden=64", "-n", "2"], "transformer: layers is missing"),
        (["transformer:hidden=many", "-n", "2"], "'hidden=many'; write hidden=4096"),
        (["transformer:hidden=0,layers=2,heads=1", "-n", "2"], "hidden = 0; give 1 to 1,000,000,000"),
        (["transformer:hidden=64,layers=1000000,heads=1", "-n", "2"], "layers = 1,000,000; give 1 to 10,000"),
        (["transformer:hidden=64,layers=2,heads=1,layers=3", "-n", "2"], "layers is said twice"),
        (["llama-3-8b:sequence=long", "-n", "2"], "'sequence=long'; write sequence=32768"),
        (["gpt-7b", "-n", "8", "--data", "3", *SELENE], "3 does not divide 8 workers; use a divisor, as 2"),
        (["gpt-7b", "-n", "8", "--micro-batches", "9", *SELENE], "with a batch of 8 and micro_batches = 9"),
        (["gpt-7b", "-n", "8", "--precision", "fp8", *SELENE], "selene-like compute no products in float8"),
        (["gpt-7b", "-n", "8", "--precision", "fp8_e4m3", *SELENE], 'say "float8"'),
        (["gpt-7b:eager=1", "-n", "8"], "'eager=1'; write sequence=32768"),
        (
            ["cosmoflow", "-n", "8", "--device", "meta", "--precision", "fp8", *SELENE],
            "it is in float32, and float8 is planned beside",
        ),
        (["gpt-7b", "-n", "8", "--constant", "fused_share=1", *SELENE], "fused_share: 1.0 is no such part"),
        (["gpt-7b", "-n", "8", "--precision", "float16", *SELENE], "half precision, whose loss must be scaled"),
        (["gpt-7b", "-n", "8", "--precision", "float32", *SELENE], "--precision float32: gpt-7b is in bfloat16"),
        (["gpt-7b", "-n", "8", "--shard", "hsdp", *SELENE], "and shard_degree = the workers of a host"),
        (["gpt-7b", "-n", "8", "--constant", "jitter=nan", *SELENE], "jitter: nan is no number that can be reached"),
        (["gpt-7b", "-n", "8", "--constant", "step_s=inf", *SELENE], "step_s: inf is no number that can be reached"),
        (["gpt-7b", "-n", "8", "--constant", "network_share=1e-320", *SELENE], "network_share: 1e-320 is no share"),
        (["gpt-7b", "-n", "8", "--constant", "step_s=1e200", *SELENE], "step_s: 1e+200 s is no overhead"),
        (["gpt-7b", "-n", "8", "--constant", "divided_times=1e300", *SELENE], "divided_times: 1e+300 must be"),
        (["gpt-7b", "-n", "8", "--constant", "jitter=5", *SELENE], "jitter: 5 is more than any machine's"),
        (["gpt-7b", "-n", "8", "--constant", "jitter=0", "--constant", "jitter=1", *SELENE], "jitter is said twice"),
        (
            ["gpt-7b", "-n", "8", "--shard-degree", "3", *SELENE],
            "shard_degree: 3 does not divide 8 workers; use a divisor, as 2",
        ),
        (["gpt-7b", "-n", "8", "--device", "tpu", *SELENE], "take cpu, or meta for no times"),
        (["gpt-7b", "-n", "8", "--cluster", "star:hosts=8"], "star does not say how much memory a worker has"),
        (["gpt-7b", "-n", "8", "--batch", "1" + "0" * 400], "--batch"),
        (["gpt-7b", "-n", "8", "--memory", "", *SELENE], "'' is no number of bytes"),
        (["train.py", "-n", "2"], "there is no workload 'train.py'"),
        (["gpt-7b", "-n", "8", "-o", "absent/plan.toml", *SELENE], "--out 'absent/plan.toml' cannot be written"),
        (["gpt-7b", "-n", "8", "-o", "/dev/full", *SELENE], "--out '/dev/full' cannot be written: No space left"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule(capsys: Captured, words: list[str], said: str) -> None:
    assert run("plan", *words) == 2
    assert said in capsys.readouterr().err


SCRIPT = """
import torch
from torch import nn


def build():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    return model, (torch.rand(8, 64), torch.rand(8, 64)), loss


def loss(model, sample):
    return nn.functional.mse_loss(model(sample[0]), sample[1])


def wrong():
    return nn.Linear(2, 2)
"""


ODD = """
import torch
from torch import nn

SAMPLE = torch.rand(8, 64)


def bare():
    return nn.ReLU(), SAMPLE


def frozen():
    return nn.Linear(64, 64).requires_grad_(False), SAMPLE


def empty():
    return nn.Linear(64, 64), torch.rand(0, 64)


def narrow():
    return nn.Linear(64, 64), torch.rand(8, 32)


def words():
    return nn.Linear(64, 64), "words"


def trains():
    model = nn.Linear(64, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), SAMPLE
"""


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("bare", "ReLU has no parameter that is trained"),
        ("frozen", "Linear has no parameter that is trained"),
        ("empty", "a batch of 0 samples; give 1 or more"),
        ("narrow", "odd.py: the model cannot train on its sample: RuntimeError: "),
        ("words", "the sample, of type str, holds no tensor"),
        ("trains", "the second is of type SGD, the third of type Tensor"),
    ],
)
def test_a_model_that_cannot_train_is_one_error(capsys: Captured, tmp_path: Path, function: str, said: str) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    assert run("plan", f"{tmp_path / 'odd.py'}:{function}", "-n", "2", "--device", "cpu") == 2
    assert said in capsys.readouterr().err


@pytest.mark.long
def test_long_sequences_and_the_workload_s_own_precision_are_planned(capsys: Captured) -> None:
    words = ("plan", "llama-3-8b:sequence=131072", "-n", "16", "--cluster", "h100-like", "--precision", "bfloat16")
    chosen = run_json(capsys, *words)["chosen"]
    assert isinstance(chosen, dict)
    assert (chosen["tensor_parallel_degree"], chosen["sequence_parallel"]) == (8, True)  # or it would not fit


def test_a_script_s_model_is_measured_and_planned(capsys: Captured, tmp_path: Path) -> None:
    script, text = tmp_path / "train.py", tmp_path / "model.workload"
    script.write_text(SCRIPT)
    found = run_json(
        capsys,
        "plan",
        f"{script}:build",
        "-n",
        "4",
        "--cluster",
        "closet",
        "--batch",
        "32",
        "--workload-out",
        str(text),
    )
    assert found["workload"] == "train"
    assert "forward_s" in text.read_text()
    again = run_json(capsys, "plan", str(text), "-n", "4", "--cluster", "closet", "--batch", "32")
    assert again["chosen"] == found["chosen"]
    divided = run_json(capsys, "plan", f"{script}:build", "-n", "4", "--cluster", "closet", "--tensor", "2")
    assert isinstance(divided["chosen"], dict)
    assert divided["chosen"]["tensor_parallel_degree"] == 2
    assert divided["chosen"]["predicted"]["tensor_s"] > 0
    assert divided["ranked"][0]["divided"]["parameters"] > 0.5  # type: ignore[index]
    assert run("plan", f"{script}:build", "-n", "6", "--cluster", "closet", "--tensor", "3") == 2
    said = capsys.readouterr().err
    assert "tensor_parallel_degree: no layer of train can be divided among 3 workers; use one of 2, 4, 8" in said
    assert run("plan", f"{script}:wrong", "-n", "4") == 2
    assert "must return (model, sample)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("lambda output: output.mean()", "loss(model, sample): too many"),
        ("nn.CrossEntropyLoss()", "write it like lambda"),
    ],
)
def test_a_loss_of_something_else_is_told_how_it_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str, said: str
) -> None:
    script = tmp_path / "train.py"
    model = "nn.Linear(8, 3), (torch.rand(4, 8), torch.zeros(4, dtype=torch.long))"
    script.write_text(f"import torch\nfrom torch import nn\ndef build():\n    return {model}, {loss}\n")
    assert run("plan", f"{script}:build", "-n", "2", "--device", "meta") == 2
    assert said in capsys.readouterr().err


NEIGHBOURLY = """
import argparse
import dataclasses
import torch
from neighbour import width  # a module beside the file

argparse.ArgumentParser().parse_args()  # the words are of `hocket plan`, not of the file


@dataclasses.dataclass
class Options:
    width: "int" = width


def build():
    return torch.nn.Sequential(*(torch.nn.Linear(Options().width, 64) for _ in range(2))), torch.rand(8, 64)


def raises():
    return {}["sizes"]


class Broken(torch.nn.Module):
    def forward(self, x):
        raise RuntimeError("forward is broken")


def broken():
    return Broken(), torch.rand(8, 64)


def nowhere():
    return torch.nn.Linear(64, 64, device="meta"), torch.rand(8, 64)
"""


@pytest.mark.parametrize(
    ("words", "name", "content", "said"),
    [
        (("plan", "-n", "2"), "binary", b"\xff\xfe", "binary is no workload's file: 'utf-8' codec"),
        (("plan", "-n", "2"), "empty", b"", "empty is no workload's file: this is no workload"),
        (("plan", "-n", "2"), "train.py", b"", "train.py:build, the name of a function"),
        (("plan", "gpt-7b", "-n", "2", "--plan"), "bad.toml", b"\xff\xfe", "bad.toml' is not TOML: 'utf-8' codec"),
        (
            ("plan", "gpt-7b", "-n", "2", "--plan"),
            "bad.toml",
            b"micro_batches = 'x'",
            "bad.toml' cannot be read:\n  mic",
        ),
        (
            ("predict", "edsr", "--cluster", "lassen", "--measured"),
            "bad.csv",
            b"\xff\xfe",
            "bad.csv is no CSV: 'utf-8'",
        ),
        (("plan", "gpt-7b", "-n", "2", "--plan"), "deep.toml", b"a = " + b"[" * 100_000, "deep.toml' is not TOML: max"),
        (("cluster", "show"), "deep.toml", b"a = " + b"[" * 100_000, "deep.toml: this is no TOML: maximum recursion"),
        (("schedule", "verify"), "deep.json", b"[" * 100_000, "deep.json: no JSON: "),
        (("compare", "trace.json"), "trace.json", b"[" * 100_000, "trace.json' is not JSON: "),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    capsys: Captured, tmp_path: Path, words: tuple[str, ...], name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert run(*[str(tmp_path / word) if word == name else word for word in words], str(tmp_path / name)) == 2
    assert said in capsys.readouterr().err


def test_a_file_may_begin_with_a_byte_order_mark(capsys: Captured, tmp_path: Path) -> None:
    """As editors of Windows write it."""
    plan, cluster, workload = tmp_path / "plan.toml", tmp_path / "mine.toml", tmp_path / "workload.txt"
    plan.write_text("micro_batches = 3", encoding="utf-8-sig")
    assert Plan.from_toml(plan).micro_batches == 3
    assert run("cluster", "show", "star:hosts=2,server=dgx-a100", "--toml") == 0
    cluster.write_text(capsys.readouterr().out, encoding="utf-8-sig")
    words = ("plan", "gpt-7b", "-n", "2", "--cluster", str(cluster))
    assert run(*words, "--workload-out", str(workload)) == 0
    workload.write_text(workload.read_text(), encoding="utf-8-sig")
    assert run("plan", str(workload), *words[2:]) == 0


def test_a_plan_may_come_through_a_pipe(capsys: Captured) -> None:
    """As `--plan <(program)` has it: it is read once, a second look finds nothing."""
    reading, writing = os.pipe()
    os.write(writing, b"tensor_parallel_degree = 8")
    os.close(writing)
    plan = f"/dev/fd/{reading}"
    found = run_json(capsys, "plan", "gpt-7b", "-n", "8", "--cluster", "selene-like", "--batch", "8", "--plan", plan)
    os.close(reading)
    assert found["describe"] == "1 data x 8 tensor"


def test_a_function_that_wants_arguments_is_one_error(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text("def build(width): ...")
    assert run("plan", f"{tmp_path / 'more.py'}:build", "-n", "2") == 2
    assert "build() is called without arguments: missing a required argument: 'width'" in capsys.readouterr().err


def test_what_a_file_prints_stays_out_of_the_answer(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        'import torch\nprint("reading")\ndef build():\n    print("building")\n'
        "    return torch.nn.Linear(4, 2), torch.rand(8, 4), lambda model, x: (print('stepping'), model(x).sum())[1]\n"
    )
    assert run("plan", f"{tmp_path / 'train.py'}:build", "-n", "2", "--device", "meta", *SELENE, "--json") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["workers"] == 2
    assert "reading\nbuilding\nstepping\n" in err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("torch.nn.Linear(4, 2)", "what it returns is of type Linear"),
        ("torch.nn.Linear(4, 2), torch.rand(8, 4), None, 1", "what it returns is (Linear, Tensor, NoneType, int)"),
        ("{'model': torch.nn.Linear(4, 2), 'sample': torch.rand(8, 4)}", "what it returns is of type dict"),
        ("None", "what it returns is missing"),
    ],
)
def test_what_a_function_returns_in_place_of_a_model_and_a_sample_is_said_by_types(
    capsys: Captured, tmp_path: Path, given: str, said: str
) -> None:
    """Models and samples in letters fill screens."""
    (tmp_path / "train.py").write_text(f"import torch\ndef build():\n    return {given}\n")
    assert run("plan", f"{tmp_path / 'train.py'}:build", "-n", "2", "--device", "meta", *SELENE) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 2


def test_json_has_no_number_that_json_does_not_know(capsys: Captured) -> None:
    print_json({"finite": 1.5, "not": [float("inf"), {"a": float("nan")}], "whole": 3, "text": "inf"})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "finite": 1.5, "not": [None, {"a": None}], "whole": 3, "text": "inf",
    }  # fmt: skip


def test_a_user_s_file_finds_its_neighbours_and_its_errors_are_one_line(capfd, tmp_path, monkeypatch) -> None:
    file, threads = tmp_path / "nets.py", torch.get_num_threads()
    file.write_text(NEIGHBOURLY)
    (tmp_path / "neighbour.py").write_text("width = 64")
    words = ["-n", "2", "--cluster", "laptop", "--batch", "32"]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    path = list(sys.path)
    try:
        assert run("plan", f"{file}:build", *words) == 0
        said = capfd.readouterr().err
        assert len(os.sched_getaffinity(0)) == 1 or "threads, as each of 2 ranks of a host has" in said
        assert run("plan", f"{file}:nowhere", *words) == 0
        assert "measured" not in capfd.readouterr().err  # a model on meta has no times
    finally:
        torch.set_num_threads(threads)
    assert sys.path == path
    for name, text in [("raises", "nets.py:20: KeyError: 'sizes'"), ("broken", "nets.py:25: RuntimeError: forward is")]:
        assert run("plan", f"{file}:{name}", *words) == 2
        said = capfd.readouterr().err
        assert text in said
        assert "Traceback" not in said
    for source, text in [("import nowhere", "bad.py:1: ModuleNotFoundError: No module"), ("a = (", "bad.py:1: '('")]:
        (tmp_path / "bad.py").write_text(source)
        assert run("predict", f"{tmp_path / 'bad.py'}:build", "--cluster", "laptop", "-n", "1,2") == 2
        assert text in capfd.readouterr().err


def test_a_bundled_workload_is_captured_without_being_run(capsys: Captured, tmp_path: Path) -> None:
    text = tmp_path / "model.workload"
    words = ["plan", "language_model", "-n", "4", "--cluster", "closet", "--batch", "16", "--workload-out", str(text)]
    assert run_json(capsys, *words)["workload"] == "language_model"
    assert "captured on the meta device" in text.read_text()
    assert "forward_s" not in text.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--tensor", "4"], "--tensor: --plan judges"), (["--shard", "none", "-o", "out.toml"], "--shard, --out: --plan")],
)
def test_what_a_judged_plan_cannot_follow_is_refused(
    capsys: Captured, tmp_path: Path, words: list[str], said: str
) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("data_parallel_degree = 8\n")
    assert run("plan", "gpt-1.7b", "-n", "8", "--cluster", "selene-like", "--plan", str(file), *words) == 2
    assert said in capsys.readouterr().err


def test_a_plan_whose_workers_do_not_agree_at_every_step_is_not_judged(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('synchronisation = "local:8"\n')
    assert run("plan", "gpt-1.7b", "-n", "8", "--cluster", "selene-like", "--plan", str(file)) == 2
    assert "synchronisation: plans are compared by the time of a step" in capsys.readouterr().err


def test_what_does_not_fit_is_judged_so(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("data_parallel_degree = 8\n")
    words = ["plan", "gpt-175b", "-n", "8", "--cluster", "selene-like", "--plan", str(file)]
    assert run(*words) == 1
    assert "it does not fit" in capsys.readouterr().out
    assert run(*words, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert (found["workers"], found["cluster"]) == (8, "selene-like")


def test_curves_with_what_ifs_cost_and_a_plot(capsys: Captured, tmp_path: Path) -> None:
    picture = tmp_path / "curve.svg"
    words = ["predict", "gpt-1.7b", "--cluster", "selene-like", "--workers", "1,8,64", "--batch", "4"]
    assert run(*words, "--what-if", "fp16") == 2
    assert "gpt-1.7b is in bfloat16" in capsys.readouterr().err
    assert run(*words, "--what-if", "sharp,bigraph,double-network", "--price", "2", "--svg", str(picture)) == 0
    said = capsys.readouterr().out
    for name in ("as it is", "sharp", "bigraph", "double-network"):
        assert f"{name}: " in said
    assert "cost per 1,000" in said
    assert picture.read_text().startswith("<svg")
    points: Any = run_json(capsys, *words, "--price", "2")["curves"][0]["points"]  # type: ignore[index]
    assert [point["workers"] for point in points] == [1, 8, 64]
    assert points[0]["cost_per_1000"] == pytest.approx(points[0]["worker_s_per_1000"] * 2 / 3600)


def test_a_column_of_one_host_is_fitted_and_has_nothing_to_say_of_several(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("workers,a\n1,10\n2,19.5\n3,28\n4,37\n")
    words = ["predict", "edsr", "--cluster", "lassen", "--measured", str(tmp_path / "a.csv")]
    found = run_json(capsys, *words, "-n", "1,4")
    assert found["fits"]["a"]["between_s"] is None  # type: ignore[index]
    assert run(*words, "-n", "1,4,8") == 2
    assert "8 workers are on several hosts" in capsys.readouterr().err


def test_a_fitted_curve_says_what_it_rests_on_and_takes_nothing_that_it_does_not_use(
    capsys: Captured, tmp_path: Path
) -> None:
    table = tmp_path / "a.csv"
    table.write_text("workers,a\n1,10\n2,19.5\n4,37\n8,70\n16,130\n")
    words = ["predict", "edsr", "--cluster", "lassen", "-n", "1,64", "--measured", str(table)]
    rows = {row["what"]: row for row in run_json(capsys, *words)["assumptions"]}  # type: ignore[attr-defined]
    assert rows["points"] == {"what": "points", "value": "of a.csv", "basis": "measured"}
    assert rows["a"]["value"].startswith("up to 16 workers, whose points are ")
    assert "5% slower for every doubling" in rows["a between hosts"]["value"]
    for option in ("--plan=/nowhere", "--batch=4", "--precision=fp8", "--device=meta", "--constant=jitter=0.1"):
        assert run(*words, option) == 2
        assert f"{option.split('=')[0]} changes nothing with --measured" in capsys.readouterr().err
    for option in ("--rounding=0.5", "--fit-up-to=16"):
        assert run(*words[:-2], option) == 2
        assert f"{option.split('=')[0]} changes nothing without --measured" in capsys.readouterr().err
    table.write_text("workers,a,a\n1,10,11\n2,19,21\n")
    assert run(*words) == 2
    assert "two columns are named 'a'" in capsys.readouterr().err


def test_where_it_stops_scaling_is_named_with_the_link(capsys: Captured) -> None:
    words = ["predict", "transformer:hidden=1024,layers=4,heads=8,sequence=16", "--workers", "1,2,4,8", "--batch", "1"]
    found = run_json(capsys, *words, "--cluster", "star:hosts=8,bandwidth=100Mbit/s,server.flops=10TFLOP/s")
    curve = found["curves"][0]  # type: ignore[index]
    assert curve["stops_at"] == 1
    assert "between hosts" in curve["verdict"]


def test_measured_points_are_fitted_and_the_rest_judged(capsys: Captured, tmp_path: Path) -> None:
    table = Path(__file__).parents[2] / "benchmarks" / "predictions" / "edsr.csv"
    words = ["predict", "edsr", "--cluster", "lassen", "--workers", "32,64,512", "--measured", str(table)]
    found = run_json(capsys, *words, "--fit-up-to", "16", "--rounding", "0.5", "--what-if", "double-network")
    assert set(found["fits"]) == {"NCCL", "MPI", "MPI-Opt"}  # type: ignore[call-overload]
    by_name = {curve["name"]: curve for curve in found["curves"]}  # type: ignore[attr-defined]
    for name in ("NCCL", "MPI", "MPI-Opt"):
        plain, twice = by_name[name], by_name[f"{name}, double-network"]
        for point in plain["points"][:2]:
            measured = plain["measured"][str(point["workers"])]
            assert point["samples_per_s"] == pytest.approx(measured, rel=0.06)
        assert twice["points"][2]["samples_per_s"] > plain["points"][2]["samples_per_s"]
    bad = tmp_path / "bad.csv"
    bad.write_text("workers,rate\n1,fast\n")
    assert run(*words[:-1], str(bad)) == 2
    assert "line 2: '1,fast' are no numbers" in capsys.readouterr().err
    for odd, said in [
        ("2,nan", "NCCL: nan with 2 workers is no throughput"),
        ("2,-5", "NCCL: -5 with 2 workers is no throughput"),
        ("0,20", "NCCL: 20 with 0 workers is no throughput"),
        ("1,20", "line 3: '1,20' says NCCL of 1 workers again"),
        ("2,20,30", "line 3: '2,20,30' has 3 cells, and there are 2 names"),
    ]:
        bad.write_text(f"workers,NCCL\n1,11\n{odd}\n4,40\n8,76\n16,142\n")
        assert run(*words[:-1], str(bad)) == 2
        assert said in capsys.readouterr().err


def test_two_traces_a_plan_and_a_trace_and_two_plans_compare(capsys: Captured, tmp_path: Path) -> None:
    one, other, plan = tmp_path / "one.json", tmp_path / "other.json", tmp_path / "plan.toml"
    assert run("simulate", "step", "--cluster", "closet", "--trace", str(one)) == 0
    assert run("simulate", "step", "--cluster", "closet", "--slowest", "1.5", "--trace", str(other)) == 0
    capsys.readouterr()
    assert run("compare", str(one), str(other)) == 0
    said = capsys.readouterr().out
    assert "bucket 0" in said
    assert "longer than" in said
    # 30 ms forward, 60 ms backward, and four buckets of 25 MB around a ring of 1 Gbit/s, a little of which is hidden.
    plan.write_text("[predicted]\nstep_s = 1.45\ncompute_s = 0.09\ngradients_s = 1.36\n")
    found = run_json(capsys, "compare", str(plan), str(one))
    parts = {row["part"]: row for row in found["parts"]}  # type: ignore[attr-defined]
    assert parts["computation"]["measured_s"] == pytest.approx(0.09)
    assert parts["step"]["measured_s"] == pytest.approx(parts["step"]["predicted_s"], rel=0.01)
    assert abs(found["error"]) < 0.01  # type: ignore[arg-type]
    sharded = tmp_path / "sharded.toml"
    sharded.write_text("[predicted]\nstep_s = 1.55\ncompute_s = 0.09\ngather_s = 1.46\n")
    found = run_json(capsys, "compare", str(plan), str(sharded))
    assert found["predicted"]["gather_s"] == [0.0, 1.46]  # type: ignore[index]
    assert found["predicted"]["gradients_s"] == [1.36, 0.0]  # type: ignore[index]
    assert run("compare", str(plan), str(plan)) == 0
    assert "for" not in capsys.readouterr().out
    plan.write_text('[reasons]\nfor = "edsr, batches of 8, 2 workers of closet"\n')
    sharded.write_text('[reasons]\nfor = "gpt-7b, batches of 8, 2 workers of closet"\n')
    assert run("compare", str(plan), str(sharded)) == 0
    said = capsys.readouterr().out
    assert ", for gpt-7b, batches of 8" in said
    assert "their times do not say which is better" in said
    assert run("compare", str(plan), str(plan)) == 0
    assert "which is better" not in capsys.readouterr().out
    plan.write_text("[predicted]\nstep_s = 1.45\ncompute_s = 0.09\ngradients_s = 1.36\n")
    assert run("compare", str(tmp_path), str(one)) == 2
    assert "holds no record of a run" in capsys.readouterr().err
    for name, seconds in (("before", 1.0), ("after", 1.5)):
        record = RankRecord(tmp_path / "runs" / name / "record", 0, 1)
        record.span(STEP, time.perf_counter(), time.perf_counter() + seconds, seq=1)
        record.ended()
    assert run("compare", str(tmp_path / "runs" / "before"), str(tmp_path / "runs")) == 0  # the newest
    said = capsys.readouterr().out
    assert re.search(r"before +after.*\nwhole +1\.0000\d\d +1\.50", said)
    assert "they ran" not in said  # nobody has said what
    for name in ("before", "after"):
        about = json.dumps({"target": "train.py", "arguments": ["--model", name]})
        (tmp_path / "runs" / name / "run.json").write_text(about)
    assert run("compare", str(tmp_path / "runs" / "before"), str(tmp_path / "runs")) == 0
    said = capsys.readouterr().out
    assert "they ran 'train.py --model before' and 'train.py --model after'" in said
    assert run("compare", str(tmp_path / "runs"), str(tmp_path / "runs")) == 0
    assert "they ran" not in capsys.readouterr().out
    assert run("compare", str(plan), str(tmp_path / "runs")) == 2
    assert "after has no spans of computation" in (said := capsys.readouterr().err)
    assert "`hocket explain RUN` says it of a run" in " ".join(said.split())
    empty = tmp_path / "trace.json"
    instant = {"ph": "X", "name": "forward", "pid": 0, "tid": 0, "ts": 1, "dur": 0}
    for events in ([], [instant]):
        empty.write_text(json.dumps({"traceEvents": events}))
        for words in ((empty, empty), (one, tmp_path), (empty, one), (plan, empty)):
            assert run("compare", *map(str, words)) == 2
            assert f"{str(empty)!r} holds nothing that takes time" in capsys.readouterr().err


@pytest.mark.long
def test_float8_is_planned_and_predicted_and_said_to_be_no_more(capsys: Captured, tmp_path: Path) -> None:
    where, out = ("--cluster", "h100-like", "--precision", "fp8"), tmp_path / "plan.toml"
    words = ("llama-3-8b:eager=1", "-n", "8", *where, "--constant", "fused_share=0.6")
    assert run("plan", *words, "-o", str(out)) == 0
    said = capsys.readouterr().out
    assert "nothing carries out products in float8 yet" in said
    assert "60% of the traffic of kernels that only read and write is taken away (given)" in said
    assert "of its bfloat16 peak" in " ".join(said.split())
    assert 'precision = "float8"' in out.read_text()
    assert run("predict", "llama-3-8b", *where, "-n", "8,16") == 0
    assert "float8 products" in capsys.readouterr().out
    judged = run_json(capsys, "plan", "llama-3-8b", "-n", "8", "--cluster", "h100-like", "--plan", str(out))
    assert any(row["what"] == "float8 products" for row in judged["assumptions"])  # type: ignore[attr-defined]


def test_a_loop_that_runs_as_the_file_is_read_is_told(capsys: Captured, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n\ndef build():\n    return torch.nn.Linear(4, 2), torch.ones(8, 4)\n\n"
        "for _ in range(3):\n    build()\n"
    )
    assert run("plan", f"{script}:build", "-n", "2", "--device", "meta", *SELENE) == 0
    assert "train.py:6: this loop runs when build is looked for; if it trains, put it under `if __name__" in (
        capsys.readouterr().err
    )


def test_a_measurement_beside_others_computation_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    machine, own, clock = (itertools.cycle(pair) for pair in ((100.0, 101.5), (10.0, 10.5), (0.0, 1.0)))
    monkeypatch.setattr(_beside, "_machine_s", partial(next, machine))
    monkeypatch.setattr(_beside, "_own_s", partial(next, own))
    monkeypatch.setattr(_beside.time, "monotonic", partial(next, clock))
    said = []
    for cores, threads in ((2, 2), (2, 1), (4, 3), (4, 4)):  # others had one core
        monkeypatch.setattr(_beside.os, "cpu_count", partial(int, cores))
        monkeypatch.setattr(torch, "get_num_threads", partial(int, threads))
        _beside.watch_for_others()()
        said.append(capsys.readouterr().err)
    assert "(on 1.0 of 2 cores, beside 2 threads here): its times may be far too long" in said[0]
    assert said[1:3] == ["", ""]
    assert "on 1.0 of 4 cores" in said[3]


def test_what_others_compute_is_what_the_machine_does_and_this_process_does_not() -> None:
    before, own = _beside._machine_s(), _beside._own_s()
    ends = time.process_time() + 0.3
    while time.process_time() < ends:
        pass
    assert before is not None
    assert _beside._machine_s() - before > _beside._own_s() - own - 0.1 > 0.1


def test_autocast_that_a_file_makes_once_for_a_gpu_holds_on_the_meta_device(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        'import torch\ncontext = torch.autocast("cuda", dtype=torch.bfloat16)\n'
        "def loss(model, x):\n    with context:\n        return model(x).sum()\n"
        "def build(): return torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.rand(8, 4), loss\n"
    )
    found = _target.resolve_target(f"{tmp_path}/train.py:build", device="meta")
    assert {one.number_format for layer in found.layers for one in layer.operations if one.flops} == {"bfloat16"}


def test_what_was_measured_on_cores_beside_others_is_told_of_and_less_sure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    told: list[int] = []
    monkeypatch.setattr(_target, "watch_for_others", lambda: lambda: told.append(1) or 1.25)
    (tmp_path / "train.py").write_text(
        "import torch\ndef build(): return torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.rand(8, 4)\n"
    )
    _target.resolve_target(f"{tmp_path}/train.py:build", device="meta")
    _target.resolve_target("gpt-7b")
    assert not told
    found = _target.resolve_target(f"{tmp_path}/train.py:build")
    assert told == [1]
    assert parse(str(found)).disturbed == 1.25
    (tmp_path / "busy.workload").write_text(str(found))
    (tmp_path / "alone.workload").write_text(str(dataclasses.replace(found, disturbed=0.0)))
    busy, alone = (
        run_json(capsys, "plan", f"{tmp_path}/{name}.workload", "-n", "2", "--batch", "8") for name in ("busy", "alone")
    )
    ends = [found["ranked"][0]["interval"]["step_s"] for found in (busy, alone)]
    assert ends[0][0] < ends[1][0] < ends[1][1] == ends[0][1]
    said = [row["value"] for row in busy["assumptions"] if row["what"] == "computation"]
    assert said == ["each layer's times, beside others on 1.2 cores: far too long, perhaps"]


OPTIMIZED = """
import torch

def build():
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))), torch.zeros(8, 64)
"""


def test_an_optimizer_is_planned_by_what_it_keeps(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OPTIMIZED)
    words = [f"{tmp_path}/train.py:build", "-n", "2", "--device", "meta"]
    state = 3 * 4 * (64 * 64 + 64)

    def found(*more: str, verb: str = "plan") -> tuple[dict[str, Any], str]:
        one: Any = run_json(capsys, verb, *words, *more)
        (row,) = [row for row in one["assumptions"] if row["what"] == "optimizer"]
        return one, f"{row['value']} ({row['basis']})"

    one, said = found("--data", "2", "--shard", "none")
    assert said == "state of 2 times the gradients' bytes (Adam; --optimizer says another) (assumed)"
    assert one["ranked"][0]["memory_bytes"]["optimizer"] == 2 * state
    one, said = found("--data", "2", "--shard", "none", "--optimizer", "SGD:momentum=0.9,nesterov=True")
    assert said == "state of 1 times the gradients' bytes (SGD:momentum=0.9,nesterov=True) (given)"
    assert one["ranked"][0]["memory_bytes"]["optimizer"] == state
    _, said = found("--cluster", "laptop", "--optimizer", "torch.optim.SGD", verb="predict")
    assert said == "state of 0 times the gradients' bytes (torch.optim.SGD) (given)"
    one, _ = found("--optimizer", "Adafactor", "--keep", "50")  # which the Trainer lets no plan divide
    assert len(one["ranked"]) > 1
    assert not [row["describe"] for row in one["ranked"] if "sharded" in row["describe"] or "tensor" in row["describe"]]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--optimizer", "Foo"], "torch.optim has no optimizer 'Foo'; write AdamW, SGD:momentum=0.9, or the"),
        (["--optimizer", "no_such_module.Adam"], "No module named 'no_such_module'"),
        (["--optimizer", "torch.nn.Linear"], "torch.nn has no optimizer 'Linear'"),
        (["--optimizer", "SGD:momentum"], "write each setting once, as SGD:momentum=0.9,nesterov=True"),
        (["--optimizer", "SGD:momentum=high"], "'high' is no number, True or False"),
        (["--optimizer", "SGD:speed=1"], "SGD has no setting 'speed'"),
        (["--optimizer", "Muon"], "no step on a parameter of shape (64,): ValueError: Muon only supports 2D"),
        (["--optimizer", "Adafactor", "--shard", "optimizer"], "Adafactor needs whole parameters"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused(capsys: Captured, tmp_path: Path, more: list[str], said: str) -> None:
    (tmp_path / "train.py").write_text(OPTIMIZED)
    assert run("plan", f"{tmp_path}/train.py:build", "-n", "2", "--device", "meta", *more) == 2
    assert said in capsys.readouterr().err


def test_an_optimizer_is_of_a_captured_model(capsys: Captured) -> None:
    assert run("plan", "gpt-7b", "-n", "8", "--cluster", "selene-like", "--optimizer", "SGD") == 2
    assert "a shape's is Adam in mixed precision" in capsys.readouterr().err
