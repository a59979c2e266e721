"""What is said of the directories of jobs: those of crashed ones, and one that cannot be made."""

import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hocket import _sweep, launch
from hocket.cli.clean import clean
from hocket.launch._clean import Leftover, remove_leftover
from hocket.launch._failure import LaunchError
from hocket.launch._job import _told


def test_what_stays_is_not_said_to_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = Leftover("job", str(tmp_path), 0, ())
    monkeypatch.setattr(launch, "leftovers", lambda: [left])
    app = typer.Typer()
    app.command()(clean)
    monkeypatch.setattr(_sweep, "sweep", lambda *_: None)  # as where permissions forbid it
    told = CliRunner().invoke(app, [])
    assert (told.exit_code, told.stdout) == (1, f"could not remove {tmp_path} (0 KiB) of job job\n")
    assert remove_leftover(Leftover("job", str(tmp_path / "none"), 0, ()))


@pytest.mark.parametrize(
    ("path", "remedy"), [(sys.executable, ""), ("/tmp/x", "; TMPDIR names another temporary directory")]
)
def test_the_remedy_is_that_of_what_could_not_be_used(path: str, remedy: str) -> None:
    with pytest.raises(LaunchError) as failed, _told():
        raise PermissionError(13, "Permission denied", path)
    assert str(failed.value) == f"the job cannot begin: [Errno 13] Permission denied: '{path}'{remedy}"
