"""What is said of the directories of crashed jobs that cannot be removed."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hocket import _sweep, launch
from hocket.cli.clean import clean
from hocket.launch._clean import Leftover, remove_leftover


def test_what_stays_is_not_said_to_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = Leftover("job", str(tmp_path), 0, ())
    monkeypatch.setattr(launch, "leftovers", lambda: [left])
    app = typer.Typer()
    app.command()(clean)
    monkeypatch.setattr(_sweep, "sweep", lambda *_: None)  # as where permissions forbid it
    told = CliRunner().invoke(app, [])
    assert (told.exit_code, told.stdout) == (1, f"could not remove {tmp_path} (0 KiB) of job job\n")
    assert remove_leftover(Leftover("job", str(tmp_path / "none"), 0, ()))
