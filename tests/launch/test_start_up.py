"""`hocket run` on one host starts ranks without torch, and gives them what elastic gives them."""

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from hocket.launch import LaunchError, _flags, launch, parse_arguments
from hocket.launch._launch import _allow_files
from hocket.testing import deadline

_HEAVY = "torch numpy networkx scipy sympy jinja2 pandas hocket.planner hocket.simulate hocket.cluster"
_DUMP = "import json, os; print(json.dumps({**os.environ, 'kept': os.environ['HOCKET_RENDEZVOUS'].split()[1][-12:]}))"
_RUN = f"""
import atexit, os, sys
from hocket.cli import main
launcher = os.getpid()
loaded = lambda: print(*[name for name in {_HEAVY!r}.split() if name in sys.modules])
atexit.register(lambda: os.getpid() == launcher and loaded())
main(sys.argv[1:])
"""


def test_launcher_loads_neither_torch_nor_numpy_nor_the_planner(script: Any, tmp_path: Path) -> None:
    path = script("import sys; print('torch' in sys.modules)")
    command = [sys.executable, "-c", _RUN, "run", "-n", "2", "--run-dir", str(tmp_path / "run"), path]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=deadline(60), check=True)
    *ranks, loaded = ran.stdout.splitlines()
    assert (sorted(ranks), loaded) == (["[0] False", "[1] False"], "")


@pytest.mark.long
def test_import_of_torch_loads_none_of_the_backend_and_sets_nothing_aside(tmp_path: Path) -> None:
    text = """import gc, sys; before = gc.get_freeze_count(); import torch, hocket
assert gc.get_freeze_count() == before
print(*[name for name in sys.modules if name.startswith('hocket')])"""
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=deadline(60), check=True)
    light = {"hocket", "hocket._lazy", "hocket._sweep", "hocket._tasks", "hocket.comm", "hocket.comm.autoload",
             "hocket.comm.rendezvous", "hocket.comm.torch_adapter"}  # fmt: skip
    parts = "hocket.comm.torch_adapter."
    assert {one for one in ran.stdout.split() if not one.startswith(parts)} <= light


def test_what_is_not_said_is_what_torchruns_parser_gives() -> None:
    light = _flags.light_parser()
    assert light is not None
    torchs = get_args_parser().parse_args(["script.py"])
    ours = light.parse_args(["script.py"])
    for name in _flags._UNSAID | dict.fromkeys(["nproc_per_node", "standalone", "module", "no_python"]):
        assert getattr(ours, name) == getattr(torchs, name), name


@pytest.mark.parametrize(
    ("words", "light"),
    [
        (["-n", "2"], True),
        (["--nproc_per_node=2", "--standalone", "-x", "A=1", "--timeout", "5"], True),
        (["-m"], True),
        (["--max-restarts", "0"], False),
        (["--nnodes", "2"], False),
        (["--log-dir", "logs", "-t", "3"], False),
        (["--stand"], False),  # an abbreviation, which torchrun's parser knows
    ],
)
def test_only_what_one_host_needs_is_done_without_elastic(words: list[str], light: bool, script: Any) -> None:
    assert parse_arguments([*words, script("")]).light is light


def test_torchruns_variables_leave_it_to_elastic(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    assert not parse_arguments([script("")]).light


def test_ranks_get_the_same_environment_from_both(launched: Any, script: Any) -> None:
    path = script(_DUMP)
    light, elastic = (launched(path, n=2, flags=flags) for flags in ([], ["--max-restarts", "0"]))
    each = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "HOCKET_JOB", "HOCKET_RENDEZVOUS",
            "HOCKET_RECORD", "HOCKET_SAVED_FILE"}  # fmt: skip
    elastics = {"TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}  # for its own use
    for rank in range(2):
        one, other = (json.loads(ran.lines(rank)[0]) for ran in (light, elastic))
        assert one.keys() == other.keys() - elastics
        assert {key: one[key] for key in one.keys() - each} == {key: other[key] for key in one.keys() - each}
        assert os.path.dirname(one["TORCHELASTIC_ERROR_FILE"]).startswith(os.path.dirname(one["HOCKET_SAVED_FILE"]))


@pytest.mark.parametrize(("limits", "raised"), [((32, 64), None), ((32, -1), (112, -1)), ((4096, 4096), None)])
def test_a_launcher_may_open_what_its_ranks_need_or_says_so_before_any_starts(
    limits: tuple[int, int], raised: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch, script: Any
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: given.append(both))
    if limits[1] == 64:
        with pytest.raises(LaunchError, match=r"8 ranks needs up to 112 open files, and .* have 64; .*ulimit -n 112"):
            launch([script("")], 8)
    else:
        _allow_files(8)
    assert given == ([] if raised is None else [raised])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", ["hocket", "rank"])
def test_a_missing_proc_is_named(command: str, script: Any, tmp_path: Path) -> None:
    """As in a chroot: the launcher blamed TMPDIR, and ranks of other launchers ended in a bare FileNotFoundError."""
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    hidden = "mount -t tmpfs none /proc"
    if not shutil.which("unshare") or subprocess.run([*inside, hidden], check=False, capture_output=True).returncode:
        pytest.skip("needs unshare, and a kernel that makes user namespaces")
    words = ["-m", "hocket", "run", "--no-run-dir", "-n", "1", script("")]
    if command == "rank":
        words = ["-c", "from hocket.comm import host_identity; host_identity()"]
    line = f"{hidden}; exec {shlex.join([sys.executable, *words])}"
    ran = subprocess.run([*inside, line], capture_output=True, text=True, timeout=deadline(60), check=False)
    assert ran.returncode == 1
    assert "mount -t proc proc /proc" in ran.stderr.splitlines()[-1]
    assert "TMPDIR" not in ran.stderr
