"""Files that others read meanwhile are whole, also where a disk is full."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from hocket._files import write_whole


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "ranks.prom"
    write_whole(path, "old\n")
    path.chmod(0o600)
    write_whole(path, "old\n")
    assert path.stat().st_mode & 0o777 == 0o600
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as a full disk, which a test cannot have
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, "new\n" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [one.name for one in tmp_path.iterdir()] == ["ranks.prom"]
    assert path.read_text() == "old\n"
