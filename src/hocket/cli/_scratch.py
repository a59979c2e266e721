"""A scratch copy of a directory, in which a script may run and write without the original or another run noticing.

Directories are made anew and files are links to the originals, so that it costs little whatever the files' size, and
relative paths to data still work. What the script makes in it is its own. What it overwrites goes through the link to
the original, as it would have without the copy; `changed` tells.
"""

import contextlib
import os
from pathlib import Path

_MOST_LINKS = 2000

State = tuple[int, int]  # time of the last change in ns, and bytes


class ScratchCopy:
    """A copy of a directory, made of links.

    Hidden directories, and those that would need more than some 2,000 links, are links as a whole: what the script
    makes in those, it makes in the original. The directories above are copied one level deep, for paths that begin
    with "..".

    Args:
        origin: The directory to copy.
        root: An empty directory, which stands for "/".
    """

    def __init__(self, origin: Path, root: Path) -> None:
        self._origin = origin.resolve()
        self._root = root
        self.path = root / self._origin.relative_to("/")
        """Where the copy is."""
        self._before: dict[Path, State | None] = {}
        self._links = 0
        self.path.mkdir(parents=True, exist_ok=True)
        for above in self._origin.parents:
            with contextlib.suppress(PermissionError):
                for entry in os.scandir(above):
                    self._link(Path(entry.path))
        waiting = [self._origin]
        for here in waiting:  # breadth first: what lies deepest is linked as a whole
            waiting.extend(self._copy(here))

    def _copy(self, here: Path) -> list[Path]:
        """Fill one directory; return those in it that are to be filled too."""
        opened = []
        self._before[here] = _state(here)
        for entry in sorted(os.scandir(here), key=lambda entry: entry.name):
            path = Path(entry.path)
            if self._opens(entry):
                self._place(path).mkdir()
                opened.append(path)
                self._links += len(os.listdir(path))
            else:
                self._link(path)
                if not _minor(path):
                    self._before[path] = _state(path)
        return opened

    def _opens(self, entry: os.DirEntry[str]) -> bool:
        if _minor(Path(entry.path)) or not entry.is_dir(follow_symlinks=False):
            return False
        if self._root.is_relative_to(entry.path) or not os.access(entry.path, os.R_OK | os.X_OK):
            return False
        return self._links + len(os.listdir(entry.path)) <= _MOST_LINKS

    def _link(self, path: Path) -> None:
        place = self._place(path)
        if not place.exists():
            place.symlink_to(path)

    def _place(self, path: Path) -> Path:
        return self._root / path.relative_to("/")

    def changed(self) -> list[str]:
        """Return what has been changed or made in the original since: sorted relative paths; directories end in "/"."""
        found = set()
        for path, before in self._before.items():
            if _state(path) == before:
                continue
            place = self._place(path)
            if not path.is_dir():
                found.add(self._name(path))
            elif place.is_symlink():
                found.add(self._name(path) + "/")
            else:
                found.update(
                    self._name(path / name)
                    for name in os.listdir(path)
                    if not _minor(path / name) and not os.path.lexists(place / name)
                )
        return sorted(found)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._origin))


def _minor(path: Path) -> bool:
    """Return whether nobody means it when they speak of the directory's contents."""
    return path.name.startswith(".") or path.name == "__pycache__"


def _state(path: Path) -> State | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
