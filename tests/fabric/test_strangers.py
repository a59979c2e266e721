"""What another user leaves in the temporary directory neither stops nor misleads this user's fabrics."""

import os
import socket
from pathlib import Path

import pytest

from hocket.cluster import load
from hocket.fabric import Fabric, FabricError, fabrics

from ..strangers import as_another_user, as_root


def _plant(directory: str) -> list[str]:
    os.chdir(directory)
    os.mkfifo("hocket-fabric-pipe.json")
    os.mkdir("hocket-fabric-folder.json")
    os.symlink("/etc/shadow", "hocket-fabric-link.json")
    Path("hocket-fabric-text.json").write_text("{")
    Path("hocket-fabric-own.json.1").write_text("{}")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("hocket-fabric-socket.json")
    return sorted(os.listdir())


@as_root
def test_planted_files_are_passed_over(temporary: Path) -> None:
    temporary.chmod(0o1777)
    planted = as_another_user(_plant, str(temporary))
    try:
        assert fabrics() == []
        for name in ("pipe", "folder", "link", "text", "socket"):
            with pytest.raises(FabricError, match="is not this user's; choose another name"):
                Fabric(load("star:hosts=1"), name=name)
            with pytest.raises(FabricError, match="is up"):
                Fabric.attach(name)
        with Fabric(load("star:hosts=1"), name="own") as fabric:
            assert [state.name for state in fabrics()] == [fabric.name]
    finally:
        for name in planted:
            path = temporary / name
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
