"""The command itself: what it lists, what it costs, and how it refuses."""

import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from hocket import __version__, cli
from hocket.cli import _output
from hocket.launch import _doctor
from hocket.launch._doctor import Diagnosis
from hocket.testing import deadline


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def hocket(capsys: pytest.CaptureFixture[str]) -> Command:
    """The command, in this process, where torch has been imported already."""

    def run(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        out, err = capsys.readouterr()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Done(code or 0, out, err)

    return run


@pytest.mark.parametrize("words", [(), ("schedule",), ("simulate",), ("cluster",), ("fabric",), ("checkpoint",)])
def test_help_shows_summaries_whole(words: tuple[str, ...], hocket: Command) -> None:
    assert "..." not in hocket(*words, "--help").stdout.replace("[ARGS]...", "")


def test_help_lists_the_verbs_that_are_there_and_loads_neither_them_nor_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "hocket", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(90), check=False)
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {"torch", "numpy", "hocket.cli.run", "hocket.cli.doctor"} & imported
    folder = Path(cli.__file__).parent
    for verb in cli._VERBS:
        assert (f"\n  {verb} " in done.stdout) == ((folder / f"{verb}.py").exists() or (folder / verb).is_dir())


@pytest.mark.parametrize("verb", [verb for verb in cli._VERBS if (Path(cli.__file__).parent / f"{verb}.py").exists()])
def test_every_verb_explains_itself(hocket: Command, verb: str) -> None:
    done = hocket(verb, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.lower().startswith("usage: hocket")


def test_every_verb_s_file_is_registered() -> None:
    files = {path.stem for path in Path(cli.__file__).parent.glob("[!_]*.py")}
    assert files <= set(cli._VERBS)


def test_every_verb_is_documented_with_each_of_its_flags() -> None:
    """`hocket run` hands its flags on to the launcher."""
    general, *sections = (Path(__file__).parents[2] / "docs" / "cli.md").read_text().split("\n## `hocket ")
    told = {section.partition("`")[0]: section for section in sections}
    commands: list[tuple[str, Any]] = []
    for verb in (path.stem for path in Path(cli.__file__).parent.glob("[!_]*.py")):
        command = typer.main.get_command(cli._application(verb)).commands[verb]
        commands += [(verb, one) for one in getattr(command, "commands", {"": command}).values()]
    missing = [
        (verb, command.name, parameter.opts)
        for verb, command in commands
        for parameter in command.params
        if (names := [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-")])
        and not any(re.search(rf"(?<![\w-]){name}(?![\w-])", told[verb] + general) for name in names)
    ]
    assert missing == []


def test_version(hocket: Command) -> None:
    assert hocket("--version").stdout == f"hocket {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "No such command 'fly'"),
        (["--fast"], "No such option: --fast"),
        (["clean", "--fast"], "No such option: --fast"),
        (["run", "--fast", "x.py"], "hocket run: unknown flag --fast\n"),
        (["run", "-n", "2", "no.py"], "hocket run: there is no script 'no.py' in "),
    ],
)
def test_bad_input_is_one_clear_error_and_exit_code_2(hocket: Command, arguments: list[str], message: str) -> None:
    done = hocket(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "said"), [(["cluster", "list"], b"hocket cluster"), (["--help"], b"hocket"), (["--version"], b"hocket")]
)
@pytest.mark.parametrize(
    ("place", "code", "lost"),
    [("", 141, b""), ("/dev/full", 1, b": what was to be written is lost: No space left on device\n")],
)
def test_what_nobody_reads_or_no_disk_holds_has_an_exit_code_of_its_own(
    place: str, code: int, lost: bytes, words: list[str], said: bytes
) -> None:
    """A pipe to `head` that is closed is neither a bad answer, nor success; a full disk is told."""
    if place:
        out = os.open(place, os.O_WRONLY)
    else:
        read, out = os.pipe()
        os.close(read)
    command = [sys.executable, "-m", "hocket", *words]
    try:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=deadline(60), check=False)
    finally:
        os.close(out)
    assert (done.returncode, done.stderr) == (code, said + lost if lost else b"")


def test_run_sums_up_in_json(hocket: Command, tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import os, sys; print('hello'); sys.exit(int(os.environ['RANK']) * 4)")
    done = hocket("run", "-n", "2", "--json", str(script))
    assert done.returncode == 4
    summary = json.loads(done.stdout)
    assert summary["outcome"] == "failed"
    assert summary["exit_code"] == 4
    assert summary["nproc"] == 2
    assert summary["failures"][0]["rank"] == 1
    assert "[1] hello" in done.stderr


def test_run_shows_what_it_would_do_without_doing_it(hocket: Command, tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    flags = ["-n", "3", "-x", "A=b c", "--dry-run"]
    done = hocket("run", *flags, str(script), "arg")
    assert done.returncode == 0
    assert len([line for line in done.stdout.splitlines() if line.endswith(f"script {script} arg")]) == 3
    assert "A='b c'" in done.stdout
    shown = hocket("run", *flags, "--hosts", "a:2", str(script), "two  spaces").stdout
    assert " A='b c' " in shown
    assert shown.endswith(" 'two  spaces'\n")
    plan = json.loads(hocket("run", *flags, "--json", str(script)).stdout)
    assert plan["nproc"] == 3
    assert plan["environment"]["A"] == "b c"
    assert not (tmp_path / "ran").exists()


def test_a_batch_script_keeps_the_flags_of_the_user_s_script(hocket: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    allocation = {"JOB_ID": "7", "JOB_NUM_NODES": "2", "NTASKS": "2", "TASKS_PER_NODE": "1(x2)"}
    for name, value in allocation.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("RANK", raising=False)
    done = hocket("run", "-n", "1", "--dry-run", "--", __file__, "--dry-run", "x")
    assert f" -n 1 -- {__file__} --dry-run x\n" in done.stdout


def test_doctor_finds_this_machine_fit(hocket: Command) -> None:
    report = json.loads(hocket("doctor", "--json").stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert report["healthy"] is True
    for name in ("torch", "backend", "shared memory", "loopback"):
        assert found[name]["status"] == "ok", found[name]
    assert "GB/s copying" in hocket("doctor", "--bandwidth").stdout


def test_doctor_s_exit_code_says_that_training_would_fail(hocket: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlisted(*_: object) -> Diagnosis:
        return Diagnosis("backend", "error", "not known", "reinstall hocket")

    monkeypatch.setattr(_doctor, "_backend", unlisted)
    done = hocket("doctor")
    assert done.returncode == 1
    assert "error    backend: not known\n         -> reinstall hocket\n" in done.stdout
    assert json.loads(hocket("doctor", "--json").stdout)["healthy"] is False


def test_doctor_says_what_to_do_when_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = {finding.name: finding for finding in _doctor.examine()}
    assert found["host name"].status == "warning"
    assert "/etc/hosts" in str(found["host name"].remedy)
    assert found["shared memory"].status == "ok"

    def broken() -> None:
        raise OSError("no /proc here")

    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 1000.0, 1000.0))
    monkeypatch.setattr(_doctor, "_memory", broken)
    found = {finding.name: finding for finding in _doctor.examine()}
    assert found["broken"].status == "error"
    assert "no /proc here" in found["broken"].found
    assert found["cores"].status == "warning"
    assert "load 1000.0" in found["cores"].found


def test_a_working_directory_that_was_removed_is_one_error(
    hocket: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = hocket("plan", "edsr", "-n", "4")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2, "hocket plan: the working directory was removed: cd to another, or into the one that has its name now",
    )  # fmt: skip
    assert "plan" in hocket("--help").stdout


def test_a_name_that_is_too_long_is_one_error(hocket: Command) -> None:
    for words in (["explain", "a" * 300], ["plan", "gpt-7b", "-n", "2", "--cluster", "lassen", "-o", "a" * 300]):
        done = hocket(*words)
        assert done.returncode == 2
        assert "aaaa'" in done.stderr


def test_a_name_that_is_not_utf8_is_written_and_said(tmp_path: Path) -> None:
    name = "progr\udce8s.svg"
    done = subprocess.run(
        [sys.executable, "-m", "hocket", "predict", "gpt-7b", "-n", "8", "--cluster", "selene-like", "--svg", name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        text=True,
        timeout=deadline(60),
    )
    assert done.returncode == 0, done.stderr
    assert "wrote progr?s.svg" in done.stdout
    assert (tmp_path / name).exists()


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as a full disk, which a test cannot have
    try:
        with pytest.raises(SystemExit):
            _output.write_file("plan", path, "new" * 1000, "--out ")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "--out '" in capsys.readouterr().err
    assert path.read_text() == "old"
    monkeypatch.setattr("os.access", lambda *_: False)  # a directory where nothing else can be made
    _output.write_file("plan", path, "new")
    assert path.read_text() == "new"


def test_a_device_or_pipe_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    link.symlink_to(file)
    for path in (pipe, link, link):
        _output.write_file("top", path, "steps 3\n")
    assert os.read(reader, 100) == b"steps 3\n"
    os.close(reader)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert file.read_text() == "steps 3\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "pipe"]
