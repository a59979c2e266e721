"""Without Hocket's extras every verb works, or says in one line which command installs what it lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hocket._extras import _EXTRAS, MissingExtraError, require
from hocket.cli import _VERBS
from hocket.testing import deadline

# Python runs this before anything else: what the extras bring is not there.
BLOCKER = f"""
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

def find_if_not_of_an_extra(name, path=None, target=None):
    return None if name in {{*{sorted(_EXTRAS)!r}, "numba", "mlxtend"}} else find_spec(name, path, target)

PathFinder.find_spec = find_if_not_of_an_extra
"""

WORKING = {
    "run": "run -n 1 --dry-run script.py",
    "train": "train cosmoflow --size tiny --steps 1 --json",
    "check": "check --help",
    "bench": "bench allreduce --sizes 1KiB --rounds 1 -n 1 --against",
    "plan": "plan cosmoflow -n 2 --json",
    "calibrate": "calibrate --help",
    "predict": "predict cosmoflow --cluster laptop --workers 1,2 --json",
    "compare": "compare one.toml one.toml",
    "schedule": "schedule list -n 2",
    "tune": "tune --help",
    "simulate": "simulate collective --cluster star:hosts=2",
    "cluster": "cluster list",
    "fabric": "fabric status",
    "aggregator": "aggregator --help",
    "checkpoint": "checkpoint --help",
    "explain": "explain --help",
    "report": "report --help",
    "top": "top --help",
    "doctor": "doctor --json",
    "clean": "clean --dry-run",
}

LACKING = {
    "train edsr -n 2": ("Pillow and scikit-image and scikit-learn", "workloads"),
    "train resnet101 -n 2": ("scikit-learn", "workloads"),
    "plan resnet101 -n 2": ("scikit-learn", "workloads"),
    "predict resnet101 --cluster laptop": ("scikit-learn", "workloads"),
    "bench allreduce --against gloo,mpi": ("mpi4py", "bench"),
    "fabric up star:hosts=2": ("pyroute2", "fabric"),
    "run -n 2 --fabric star:hosts=2 script.py": ("pyroute2", "fabric"),
}


# One interpreter loads torch; each command is a fork of it, which ends without taking torch down again. So are
# the ranks of `train` and `bench`; `run` starts one.
FORKS = """
import gc, json, os, runpy, sys, tempfile
import torch._dynamo, hocket.cli, hocket.launch, hocket.parallel, hocket.planner, hocket.workload
import hocket.cli._bench.world as world

def fork(module, *words, env):
    if (pid := os.fork()) == 0:
        os.environ.update(env)
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

def launch(command, n, *, env, **_):
    fork(*command, env=env)
    return hocket.launch.LaunchResult("finished", 0, 1, 0.0, 0)

def run_world(module, spec, n, **_):
    with tempfile.TemporaryDirectory() as directory:
        path, result = f"{directory}/spec", f"{directory}/result"
        with open(path, "w") as file:
            json.dump({**spec, "n": n, "store": f"{directory}/store", "result": result}, file)
        fork(module, path, env={"RANK": "0", "WORLD_SIZE": "1"})
        return json.load(open(result))

hocket.launch.launch, world.run_world = launch, run_world
gc.freeze()
for number, words in enumerate(json.loads(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(f"{number}{stream.name}", os.O_WRONLY | os.O_CREAT), stream.fileno())
        code = 0
        try:
            hocket.cli.main(words)
        except SystemExit as end:
            code = end.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
KERAS = "run -n 1 ask.py"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """How each command ends where nothing of the extras can be imported, in a directory with scripts."""
    directory = tmp_path_factory.mktemp("bare")
    (directory / "sitecustomize.py").write_text(BLOCKER)
    (directory / "script.py").write_text("print('hello')\n")
    (directory / "ask.py").write_text("import hocket.keras\n")
    (directory / "one.toml").write_text("micro_batches = 1\n")
    path = os.pathsep.join([str(directory), str(Path(__file__).parents[2] / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    commands = [*WORKING.values(), *LACKING, KERAS]
    words = [[*command.split(), *([""] if command.endswith("--against") else [])] for command in commands]
    done = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps(words)],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=deadline(110), check=False,
    )  # fmt: skip
    codes = done.stdout.split()
    assert len(codes) == len(commands), done.stderr
    return {
        command: subprocess.CompletedProcess(
            command, int(code), *((directory / f"{number}<{stream}>").read_text() for stream in ("stdout", "stderr"))
        )
        for number, (command, code) in enumerate(zip(commands, codes, strict=True))
    }


def test_every_verb_is_tried():
    assert set(WORKING) == set(_VERBS)


@pytest.mark.long
@pytest.mark.parametrize("command", WORKING.values(), ids=WORKING)
def test_a_verb_that_needs_no_extra_works(command, bare):
    done = bare[command]
    assert done.returncode in ((0, 1) if "doctor" in command else (0,)), done.stderr
    assert "Traceback" not in done.stderr
    if "--json" in command:
        json.loads(done.stdout)


@pytest.mark.parametrize("command", LACKING)
def test_a_verb_that_needs_an_extra_names_the_command_that_installs_it(command, bare):
    done = bare[command]
    project, extra = LACKING[command]
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(f"hocket {command.split()[0]}: ")
    assert f"needs {project}, which " in done.stderr
    assert done.stderr.endswith(f'not installed: pip install "hocket[{extra}]"\n')
    assert not done.stdout


def test_keras_is_asked_for_by_its_extra(bare):
    done = bare[KERAS]
    assert done.returncode == 1
    assert 'hocket.keras needs Keras 3, which is not installed: pip install "hocket[keras]"' in done.stderr


def test_every_extra_is_one_of_the_wheel():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {extra for _, extra in _EXTRAS.values()} <= set(project["optional-dependencies"])


def test_what_is_installed_is_not_asked_for():
    require("this test")
    require("this test", "sys")


def test_all_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("hocket._extras._is_installed", lambda module: module == "skimage")
    with pytest.raises(MissingExtraError, match="this test needs Pillow and scikit-learn, which are not installed"):
        require("this test", "PIL", "skimage", "sklearn")
