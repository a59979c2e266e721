"""The same script, unchanged, as `python script.py` and under `hocket run`."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hocket.testing import deadline

pytestmark = pytest.mark.long

# What a program can see of how it was started, less what the process numbers and the launchers' variables are.
LOOK = """
import sys
import __main__
import helper

class Pickled:
    pass

def worker(queue):
    queue.put((Pickled.__module__, sys.argv, __name__))

def look():
    import json, multiprocessing, pickle
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=worker, args=(queue,))
    child.start()
    seen = {
        "argv": sys.argv,
        "orig_path": sys.path,
        "names": sorted(globals()),
        "file": __file__, "name": __name__, "package": __package__, "doc": __doc__, "cached": __cached__,
        "spec": __spec__ and __spec__.name,
        "loader": type(__loader__).__name__,
        "builtins": type(__builtins__).__name__,
        "main": vars(__main__) is globals() and sys.modules["__main__"] is __main__,
        "module": Pickled.__module__,
        "pickles": type(pickle.loads(pickle.dumps(Pickled()))).__name__,
        "helper": helper.__file__,
        "annotations": __annotations__,
        "child": queue.get(timeout=30),
        "imported": sorted({"torch", "hocket", "numpy"} & set(sys.modules)),
    }
    child.join()
    print(json.dumps(seen))

if __name__ == "__main__":
    look()
"""


def output(command: list[str], directory: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=deadline(100),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "look.py").write_text(LOOK)
    (tmp_path / "sub" / "helper.py").write_text("")
    (tmp_path / "link.py").symlink_to(tmp_path / "sub" / "look.py")
    return tmp_path


@pytest.mark.parametrize(
    ("where", "target"),
    [
        (".", ["sub/look.py", "a", "--b=c d"]),
        (".", ["./sub/../sub/look.py"]),
        (".", ["link.py"]),
        ("sub", ["look.py"]),
        ("sub", ["-m", "look", "x"]),
    ],
)
def test_a_script_sees_what_it_sees_under_python(
    launched: Any, directory: Path, monkeypatch: pytest.MonkeyPatch, where: str, target: list[str]
) -> None:
    plain = json.loads(output([sys.executable, *target], directory / where))
    monkeypatch.chdir(directory / where)
    flags, command = (["-m"], target[1:]) if target[0] == "-m" else ([], target)
    assert json.loads(launched(*command, n=1, flags=flags).out) == plain
    assert plain["main"] is True
    assert plain["imported"] == []


def test_a_safe_path_stays_safe(launched: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "path.py").write_text("import json, sys; print(json.dumps(sys.path))")
    plain = output([sys.executable, "path.py"], directory, PYTHONSAFEPATH="1")
    monkeypatch.chdir(directory)
    assert launched("path.py", n=1, env={"PYTHONSAFEPATH": "1"}).out == plain


def test_directories_and_archives_run(launched: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "sub" / "__main__.py").write_text("import helper, sys; print(helper.__name__, sys.argv)")
    plain = output([sys.executable, "sub", "x"], directory)
    monkeypatch.chdir(directory)
    assert launched("sub", "x", n=1).out == plain
    shutil.make_archive("packed", "zip", directory / "sub")
    assert launched("packed.zip", "x", n=1).out == plain.replace("'sub'", "'packed.zip'")


def test_a_script_for_gloo_runs_by_the_words_of_torchrun(tmp_path: Path) -> None:
    """What trains under every launcher is in compose/test_distribute."""
    source = """
    import os
    import sys
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([1.0 + int(os.environ["RANK"])])
    dist.all_reduce(total)
    dist.destroy_process_group()
    sys.stdout.write(f"sum {total.item()} of {os.environ['WORLD_SIZE']}\\n")  # in one piece: two ranks share the pipe
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(source))
    words = ["run", "--standalone", "--nproc-per-node=2", "train.py"]
    ours = output([sys.executable, "-m", "hocket", *words], tmp_path)
    assert sorted(ours.splitlines()) == ["[0] sum 3.0 of 2", "[1] sum 3.0 of 2"]
