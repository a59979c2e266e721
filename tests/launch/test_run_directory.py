"""Every `hocket run` leaves a directory: what was started, what each rank printed, its record, and how it ended."""

import io
import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hocket.launch import LaunchError, launch, parse_arguments
from hocket.launch._run_directory import LaunchDirectory
from hocket.planner import Plan
from hocket.profile import read_run
from hocket.testing import deadline

TRAIN = """
import sys, torch, hocket
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
model = torch.nn.Linear(3, 1)
trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
for batch in trainer.batches(torch.utils.data.DataLoader(data, batch_size=4)):
    trainer.step(batch)
print("no line end", end="")
print("a warning", file=sys.stderr)
"""


def environment(**more: str) -> dict[str, str]:
    """The variables of a user, not of a test."""
    return {name: value for name, value in os.environ.items() if name != "HOCKET_RUN_DIR"} | more


def test_a_run_is_kept_with_settings_plan_logs_and_records(hocket_forked: Any, script: Any, tmp_path: Path) -> None:
    script(TRAIN, "my train.py")
    words = ["run", "-n", "2", "-x", "API_TOKEN=verysecret", "-x", "MARK=7", "my train.py", "--lr", "3"]
    ended = hocket_forked(*words, cwd=tmp_path, env=environment(HF_TOKEN="verysecret", TMPDIR=str(tmp_path)))
    assert ended.returncode == 0, ended.stderr
    (directory,) = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    assert directory.name.startswith("my-train-20")
    assert f"hocket: this run is kept in runs/{directory.name}" in ended.stderr
    kept = json.loads((directory / "run.json").read_text())
    assert (kept["outcome"], kept["exit_code"], kept["nproc"], kept["arguments"]) == ("finished", 0, 2, ["--lr", "3"])
    assert kept["command"][1:6] == ["run", "-n", "2", "-x", "API_TOKEN=..."]
    assert kept["environment"]["MARK"] == "7"
    assert kept["versions"]["torch"]
    assert not [path for path in directory.rglob("*") if path.is_file() and b"verysecret" in path.read_bytes()]
    assert Plan.from_toml(directory / "plan.toml").describe() == "2 data"
    for rank in range(2):
        assert (directory / f"rank-{rank}.out").read_bytes() == b"no line end"
        assert b"a warning\n" in (directory / f"rank-{rank}.err").read_bytes()
    assert read_run(tmp_path / "runs").world == 2
    assert (tmp_path / "runs" / ".gitignore").read_text() == "*\n"


@pytest.mark.long
def test_failures_and_restarts_are_kept_and_a_directory_may_be_used_again(
    launched: Any, script: Any, tmp_path: Path
) -> None:
    source = """
import os, pathlib, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
said = pathlib.Path(os.environ["HOCKET_TEST"], f"said-{attempt}-{os.environ['HOCKET_JOB']}")
print("attempt", attempt, flush=True)
if os.environ["RANK"] == "1":
    said.touch()
    time.sleep(60)
os.environ["WORLD_SIZE"] = "1"  # the record of one rank is enough, and the import of torch in one
from torch import distributed as dist
dist.init_process_group("hocket")
while not said.exists():
    time.sleep(0.01)
raise ValueError("no luck")
"""
    place = tmp_path / "here"
    for restarts, printed in ((1, "attempt 0\nattempt 1\n"), (0, "attempt 0\nattempt 1\nattempt 0\n")):
        ran = launched(script(source), n=2, flags=[f"--max-restarts={restarts}", f"--run-dir={place}"])
        assert ran.result.run_dir == str(place)
        kept = json.loads((place / "run.json").read_text())
        assert (kept["outcome"], kept["exit_code"], kept["restarts"]) == ("failed", 1, restarts)
        assert kept["failures"][0]["error"] == "ValueError: no luck"
        assert (place / "rank-1.out").read_text() == printed
        assert (place / "hocket.log").read_text().count("starting all ranks again: restart 1 of 1") == 1
    assert sorted(path.name for path in place.glob("record*")) == ["record", "record-1", "record-2"]


def test_which_directory(monkeypatch: pytest.MonkeyPatch, script: Any, tmp_path: Path) -> None:
    path = script("")
    monkeypatch.delenv("HOCKET_RUN_DIR")
    monkeypatch.delenv("HOCKET_JOB", raising=False)
    assert parse_arguments([path]).run_dir is None
    assert str(parse_arguments([path], kept=True).run_dir).startswith("runs/script-20")
    assert parse_arguments(["--no-run-dir", path], kept=True).run_dir is None
    assert parse_arguments(["--run-dir", "x", path]).run_dir == "x"
    for off in (["--run-dir", "off"], ["--run-dir=off"], ["--run-dir", "0"]):
        for words in (off, ["--nnodes=1", *off]):  # by either parser
            read = parse_arguments([*words, path], kept=True)
            assert (read.run_dir, read.run_dir_given) == (None, False)
    assert parse_arguments(["--run-dir", "./off", path]).run_dir == "./off"
    monkeypatch.setenv("HOCKET_RUN_DIR", "/some/where")
    assert parse_arguments([path], kept=True).run_dir == "/some/where"
    assert parse_arguments(["--run-dir", "off", path], kept=True).run_dir is None
    monkeypatch.setenv("HOCKET_RUN_DIR", "off")
    assert parse_arguments([path], kept=True).run_dir is None
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="no directory for this run can be made"):
        launch([path], 1, flags=["--run-dir", str(tmp_path / "file" / "x")])


def test_two_runs_that_begin_in_the_same_second_have_a_directory_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make, path = os.makedirs, str(tmp_path / "runs" / "train-1")

    def other_is_first(name: str, mode: int = 0o777, exist_ok: bool = False) -> None:
        if name == path and not os.path.exists(name):
            make(name)
        make(name, mode, exist_ok)

    monkeypatch.setattr(os, "makedirs", other_is_first)
    assert LaunchDirectory(path, new=True).path == f"{path}-2"
    assert LaunchDirectory(path).path == path


SSH = """#!/bin/sh
while [ "$1" != -- ]; do host="$last"; last="$1"; shift; done
shift
if [ "$last" = b ]; then exec unshare -m sh -c "mount --bind {other} {shared} && $*"; fi
exec sh -c "$*"
"""


@pytest.mark.long
def test_a_directory_in_which_another_run_has_not_ended_is_not_taken(
    hocket: Any, script: Any, tmp_path: Path, wait_until: Any
) -> None:
    ready = tmp_path / "ready"
    waits = script(f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(60)", "waits.py")
    ends = script("print('well')", "ends.py")
    first = hocket("run", "-n", "1", "--run-dir", "kept", waits, cwd=tmp_path, env=environment())
    wait_until(ready.exists)
    for flags, more in (("--run-dir", "kept"), {}), ((), {"HOCKET_RUN_DIR": str(tmp_path / "kept")}):
        second = hocket("run", "-n", "1", *flags, ends, cwd=tmp_path, env=environment(**more))
        out, err = second.communicate(timeout=deadline(60))
        assert (second.returncode, out) == (1, "")
        assert "another run, which has not ended, is kept there; name another with --run-dir" in err
    assert json.loads((tmp_path / "kept" / "run.json").read_text())["target"].endswith("waits.py")
    first.kill()
    first.wait()
    again = hocket("run", "-n", "1", "--run-dir", "kept", ends, cwd=tmp_path, env=environment())
    assert again.communicate(timeout=deadline(60))[0] == "well\n"


def test_a_lock_of_another_host_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = LaunchDirectory(str(tmp_path / "kept"))
    (tmp_path / "kept" / "run.json").write_text('{"host": {"host": "elsewhere"}}')
    monkeypatch.setattr("hocket.launch._run_directory.time.sleep", lambda _: held.ended())
    LaunchDirectory(str(tmp_path / "kept")).ended()
    hosts = [LaunchDirectory(str(tmp_path / "shared"), shared=True) for _ in range(2)]  # c10d: none has a number yet
    for host in hosts:
        host.ended()


@pytest.mark.long
def test_hosts_without_a_shared_disk_send_what_they_kept(hocket: Any, script: Any, tmp_path: Path) -> None:
    shared, other, ssh = tmp_path / "runs", tmp_path / "runs of b", tmp_path / "ssh"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0:
        pytest.skip("a disk of a host's own needs a mount namespace")
    shared.mkdir()
    other.mkdir()
    ssh.write_text(SSH.format(other=f"'{other}'", shared=f"'{shared}'"))
    ssh.chmod(stat.S_IRWXU)
    script("import os; print('rank', os.environ['RANK'])")
    words = ["run", "--hosts", "a,b", "--ssh", str(ssh), "--run-dir", "runs/both", "script.py"]
    process = hocket(*words, cwd=tmp_path, env=environment())
    out, err = process.communicate(timeout=deadline(120))
    assert process.returncode == 0, err
    kept = shared / "both"
    assert json.loads((kept / "run.json").read_text())["hosts"] == {"a": 1, "b": 1}
    for rank in range(2):
        assert (kept / f"rank-{rank}.out").read_text() == f"rank {rank}\n"
        assert json.loads((kept / f"run-node{rank}.json").read_text())["outcome"] == "finished"


def test_of_a_full_disk_the_last_sentence_tells(tmp_path: Path) -> None:
    directory = LaunchDirectory(str(tmp_path / "run"))
    assert directory.kept().endswith("run")
    directory._log.close()
    directory._log = io.FileIO("/dev/full", "a")
    directory.note(["all is well"])
    assert directory.kept().endswith("run, but not whole: No space left on device")
