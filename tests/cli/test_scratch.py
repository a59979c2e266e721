"""A directory made of links, in which a script runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hocket.cli import _scratch
from hocket.cli._scratch import ScratchCopy


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = tmp_path / "work" / "project"
    (place / "data" / "images").mkdir(parents=True)
    (place / "data" / "images" / "a.txt").write_text("a")
    (place / "config.txt").write_text("one")
    (place / ".hidden").mkdir()
    (place / "away").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "work" / "shared").mkdir()
    (tmp_path / "work" / "shared" / "b.txt").write_text("b")
    return place


@pytest.fixture
def scratch(project: Path, tmp_path_factory: pytest.TempPathFactory) -> ScratchCopy:
    return ScratchCopy(project, tmp_path_factory.mktemp("root"))


def test_files_are_found_under_their_relative_paths(scratch: ScratchCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scratch.path)
    assert Path("config.txt").read_text() == "one"
    assert Path("data/images/a.txt").read_text() == "a"
    assert Path("../shared/b.txt").read_text() == "b"
    assert Path(".hidden").is_dir()
    assert not Path("away").exists(), "a link that leads nowhere still does"


def test_what_is_made_in_it_is_not_in_the_original(scratch: ScratchCopy, project: Path) -> None:
    (scratch.path / "checkpoint").write_text("new")
    (scratch.path / "data" / "images" / "c.txt").write_text("new")
    assert not (project / "checkpoint").exists()
    assert sorted(os.listdir(project / "data" / "images")) == ["a.txt"]
    assert scratch.changed() == []


def test_what_reaches_the_original_is_named(scratch: ScratchCopy, project: Path) -> None:
    (scratch.path / "config.txt").write_text("three")
    (project / "data" / "new.txt").write_text("by its absolute path")
    (project / "__pycache__").mkdir()
    (project / ".hidden" / "log").write_text("of no interest")
    assert scratch.changed() == ["config.txt", "data/new.txt"]
    (project / "config.txt").unlink()
    assert scratch.changed() == ["config.txt", "data/new.txt"]


def test_a_large_directory_is_one_link(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_scratch, "_MOST_LINKS", 3)
    for i in range(4):
        (project / "data" / "images" / f"{i}.txt").write_text("")
    scratch = ScratchCopy(project, tmp_path_factory.mktemp("root"))
    assert not (scratch.path / "data").is_symlink()
    assert (scratch.path / "data" / "images").is_symlink()
    (scratch.path / "data" / "images" / "5.txt").write_text("")
    assert scratch.changed() == ["data/images/"]


def test_it_may_lie_in_what_it_copies(project: Path) -> None:
    root = project / "tmp" / "root"
    root.mkdir(parents=True)
    assert (ScratchCopy(project, root).path / "config.txt").read_text() == "one"
