"""Documented commands print exactly what the transcripts in golden/ say."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hocket.cli import _application

GOLDEN = Path(__file__).parent / "golden"
TRANSCRIPTS = sorted(path for path in GOLDEN.glob("*.txt") if path.read_text().startswith("$ "))


def run(command, monkeypatch):
    """What a command prints, errors too, and its exit code if it is not 0."""
    monkeypatch.chdir(GOLDEN)
    _, *words = shlex.split(command)
    result = CliRunner().invoke(_application(words[0]), words, prog_name="hocket")
    ending = f"exit code {result.exit_code}\n" if result.exit_code else ""
    return result.output + ending


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_commands_print_what_the_transcript_says(path, monkeypatch, request):
    commands = [line[2:] for line in path.read_text().splitlines() if line.startswith("$ ")]
    printed = "".join(f"$ {command}\n{run(command, monkeypatch)}\n" for command in commands)
    if request.config.getoption("--golden-update"):
        path.write_text(printed)
    assert printed == path.read_text()
