"""Files that others read meanwhile are whole, also where a disk is full."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hocket._files import write_asked, write_whole
from hocket.comm.shm import SharedSegment
from hocket.timeline import Span, Timeline, write_perfetto


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """As a full disk, which a test cannot have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def traced(path: Path, text: str) -> None:
    write_perfetto(Timeline("one", tuple(Span(0, "compute", word, 0.0, 1.0) for word in text.split())), path)


@pytest.mark.parametrize("write", [write_whole, write_asked, traced])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, write: Callable[[Path, str], None]
) -> None:
    path = tmp_path / "ranks.prom"
    write_whole(path, "old\n")
    path.chmod(0o600)
    write_whole(path, "old\n")
    assert path.stat().st_mode & 0o777 == 0o600
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
        write(path, "new\n" * 1000)
    assert [one.name for one in tmp_path.iterdir()] == ["ranks.prom"]
    assert path.read_text() == "old\n"


def test_shared_memory_above_the_limit_of_files_says_what_to_do() -> None:
    with files_of_at_most(1000), pytest.raises(OSError, match=r"8192 bytes .* say `ulimit -f unlimited`"):
        SharedSegment.create("test", 8192)
