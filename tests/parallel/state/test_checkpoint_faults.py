"""A checkpoint is whole, or refused: after a kill at any instant of `save`, with damaged files, of something else."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hocket
from hocket.parallel import CheckpointError
from hocket.parallel.state import _lock, _manifest, _reader, _replace, checkpoint
from hocket.planner import Plan
from hocket.testing import deadline, run_ranks

CHECKOUT = Path(__file__).parents[3]


class Moments:
    """A small model, with all of its state set to one number: a mixture of two checkpoints shows."""

    def __init__(self, layers: int = 2) -> None:
        self.model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.trainer = hocket.Trainer(self.model, nn.functional.mse_loss, self.optimizer)
        self.trainer.step((torch.ones(2, 5), torch.ones(2, 5)))

    @torch.no_grad()
    def fill(self, number: int) -> None:
        for tensor in self.tensors():
            tensor.fill_(number)
        self.trainer.steps = number

    def tensors(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *(t for s in self.optimizer.state.values() for t in s.values())]

    def numbers(self) -> set[float]:
        return {self.trainer.steps, *(float(x) for tensor in self.tensors() for x in tensor.detach().unique())}


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moments]:
    if torch.cuda.is_available():
        pytest.skip("a process that has used a GPU cannot fork one that saves")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked process has no others
    found = Moments()
    found.trainer.save(tmp_path_factory.mktemp("first") / "ck")  # imports what saving needs
    yield found
    torch.set_num_threads(threads)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder whose files are quickly on their disk, since a process that is killed loses nothing that it wrote."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def killed(run: Callable[[], Any], after_s: float | None = None) -> bool:
    """Runs in a forked process, which is killed after a while if it does not end before; whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def killed_at_operation(number: int, run: Callable[[], Any]) -> bool:
    """Runs in a forked process, which is killed before that operation on files; whether it came to there."""
    operations = 0

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal operations
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "ctypes.dlsym"):
            operations += 1
            if operations > number:
                os.kill(os.getpid(), signal.SIGKILL)

    def audited() -> None:
        sys.addaudithook(audit)
        run()

    return killed(audited)


def loaded(moments: Moments, path: Path) -> int:
    """The number in all of what a checkpoint holds; 0 if there is none."""
    moments.fill(-1)
    try:
        moments.trainer.load(path)
    except CheckpointError as error:
        missing = "there is no checkpoint" in str(error)
        assert moments.numbers() == {-1}
        if not missing:
            raise
        return 0
    (number,) = moments.numbers()
    return int(number)


def duration_s(moments: Moments, path: Path) -> float:
    taken = []
    for _ in range(5):
        begun_s = time.perf_counter()
        killed(lambda: moments.trainer.save(path))
        taken.append(time.perf_counter() - begun_s)
    return max(taken)


@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.long)])
def test_a_kill_at_a_random_instant_leaves_a_checkpoint(moments: Moments, memory: Path, kills: int) -> None:
    longest_s = duration_s(moments, memory / "timed")
    draw = random.Random(5)
    last, ended = 0, 0
    for i in range(1, kills + 1):
        path = memory / f"ck{i // 10}"
        last = 0 if i % 10 == 0 else last  # the first in this folder
        moments.fill(i)
        whole = not killed(lambda path=path: moments.trainer.save(path), draw.uniform(0, 1.1 * longest_s))
        found = loaded(moments, path)
        assert found == i or (found == last and not whole)
        last, ended = found, ended + (found == i)
    assert kills < 100 or kills / 20 < ended < kills * 19 / 20  # kills came before and after the instant that counts


@pytest.mark.parametrize("each", [4, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("exchange", [True, False])
def test_a_kill_before_any_operation_leaves_a_checkpoint(
    moments: Moments, memory: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool, each: int
) -> None:
    if not exchange:
        monkeypatch.setattr(_replace, "exchange", lambda one, other: False)
    for first in (True, False):
        ended = False
        for i in range(1, 200):
            path = memory / f"ck{i if first else ''}"
            if not first:
                moments.fill(1000 + i)
                moments.trainer.save(path)
            moments.fill(i)
            ended = not killed_at_operation((i - 1) * each, lambda path=path: moments.trainer.save(path))
            assert loaded(moments, path) in ({i} if ended else {i, 0} if first else {i, 1000 + i})
            if ended:
                break
        assert ended
        assert i > 10 / each


def same(moments: Moments, path: Path, match: str) -> None:
    """It is refused, and nothing is overwritten."""
    moments.fill(-1)
    with pytest.raises(CheckpointError, match=match):
        moments.trainer.load(path)
    assert moments.numbers() == {-1}


@pytest.mark.parametrize("places", [64, pytest.param(2000, marks=pytest.mark.long)])
def test_damage_anywhere_is_refused(moments: Moments, tmp_path: Path, places: int) -> None:
    moments.fill(3)
    moments.trainer.save(tmp_path / "ck", {"epoch": 3})
    draw = random.Random(7)
    files = sorted(p for p in (tmp_path / "ck").iterdir())
    assert {p.name for p in files} == {".metadata", "__0_0.distcp", "manifest.json"}
    for i in range(places):
        path = files[i % len(files)]
        content = path.read_bytes()
        at = draw.randrange(len(content))
        damaged = content[:at] + draw.randbytes(64) + content[at + 64 :]
        path.write_bytes(damaged)
        same(moments, tmp_path / "ck", "damaged")
        path.write_bytes(content)
    for path in files:
        content = path.read_bytes()
        for cut in (0, 1, len(content) // 2, len(content) - 2):
            path.write_bytes(content[:cut])
            same(moments, tmp_path / "ck", "damaged")
        path.unlink()
        same(moments, tmp_path / "ck", "manifest.json: a file is lost" if path.name == "manifest.json" else path.name)
        path.write_bytes(content)
    assert moments.trainer.load(tmp_path / "ck") == {"epoch": 3}
    assert moments.numbers() == {3}


def test_a_newer_version_is_refused(moments: Moments, tmp_path: Path) -> None:
    moments.trainer.save(tmp_path / "ck")
    content = json.loads((tmp_path / "ck" / "manifest.json").read_text())
    del content["checksum"]
    content["version"] += 1
    content["checksum"] = _manifest._checksum(content)
    (tmp_path / "ck" / "manifest.json").write_text(json.dumps(content))
    same(moments, tmp_path / "ck", "is of version 3, and this Hocket reads up to version 2: install a newer one")


class Exploit:
    """Says that it was unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_runs_only_of_objects_that_the_user_kept_and_only_if_they_are_wanted(
    moments: Moments, tmp_path: Path
) -> None:
    moments.trainer.save(tmp_path / "ck", {"rate": 0.1, "seen": torch.ones(3), "set": {1, 2}})
    assert moments.trainer.load(tmp_path / "ck")["set"] == {1, 2}
    arrays = {kind: np.ones(2, kind) for kind in ("u1", "i1", "i2", "i4", "u4", "u8", "f2", "f4", "?", "U3", "S3")}
    moments.trainer.save(tmp_path / "ck", arrays)
    assert {kind: array.dtype for kind, array in moments.trainer.load(tmp_path / "ck").items()} == {
        kind: np.dtype(kind) for kind in arrays
    }
    moments.trainer.save(tmp_path / "ck", Exploit(tmp_path / "run"))
    with pytest.raises(
        CheckpointError, match=r"'extra' has objects whose unpickling can run code .* weights_only=False"
    ):
        moments.trainer.load(tmp_path / "ck")
    (group,) = moments.optimizer.param_groups
    group["note"] = Exploit(tmp_path / "run")
    moments.trainer.save(tmp_path / "ck")
    del group["note"]
    for read in (moments.trainer.load, moments.trainer.load_state_dict, hocket.read_state_dict):
        with pytest.raises(CheckpointError, match=r"'about' has objects whose unpickling can run code"):
            read(tmp_path / "ck")
    assert not (tmp_path / "run").exists()
    moments.trainer.load(tmp_path / "ck", weights_only=False)
    assert (tmp_path / "run").exists()
    del group["note"]
    with pytest.raises(CheckpointError, match="`extra` cannot be pickled"):
        moments.trainer.save(tmp_path / "ck", lambda: None)
    assert {p.name for p in tmp_path.iterdir() if p.name.startswith("ck")} == {"ck", "ck.lock"}


def linear(
    optimizer: Callable[..., Any] = torch.optim.AdamW, layers: int = 2, *, split: Any = None, dtype: Any = None
) -> hocket.Trainer:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))).to(dtype or torch.float32)
    names = dict(model.named_parameters())
    groups = [{"params": [names[n] for n in group]} for group in split] if split else model.parameters()
    return hocket.Trainer(model, nn.functional.mse_loss, optimizer(groups, lr=0.1))


WEIGHTS, BIASES = ["0.weight", "1.weight"], ["0.bias", "1.bias"]
OTHERS: list[tuple[Callable[[], hocket.Trainer], str]] = [
    (lambda: linear(torch.optim.SGD), "state of AdamW, and the optimizer is SGD"),
    (lambda: linear(split=[WEIGHTS, BIASES]), "had 1 parameter groups, and this one has 2"),
    (lambda: linear(split=[WEIGHTS]), "'0.bias' is in parameter group 0 of the optimizer there and not here"),
    (lambda: linear(layers=1), "has more than the model: '1.bias', '1.weight'"),
    (lambda: linear(layers=3), "has no '2.bias', '2.weight'"),
    (lambda: linear(dtype=torch.float64), "'0.weight' is torch.float64 here and torch.float32 in it"),
]


@pytest.mark.parametrize(("other", "said"), OTHERS, ids=range(len(OTHERS)))
def test_another_model_or_optimizer_is_refused(tmp_path: Path, other: Callable[[], hocket.Trainer], said: str) -> None:
    linear().save(tmp_path / "ck")
    trainer = other()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    settings = repr(trainer.optimizer.state_dict())
    with pytest.raises(CheckpointError, match=said):
        trainer.load(tmp_path / "ck")
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert repr(trainer.optimizer.state_dict()) == settings


def test_what_is_in_the_way_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "one.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    trainer = linear()
    for name in ("notes", "file", "file/below"):
        with pytest.raises(CheckpointError, match="cannot be written"):
            trainer.save(tmp_path / name)
    assert (tmp_path / "notes" / "one.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    (tmp_path / "first").mkdir()
    (tmp_path / "latest").symlink_to("first")
    trainer.save(tmp_path / "latest")
    trainer.load(tmp_path / "first")
    assert (tmp_path / "latest").is_symlink()


def test_what_was_replaced_and_cannot_be_removed_is_no_failure(
    moments: Moments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another user's checkpoint in a directory of a group; files that are open elsewhere, on NFS."""
    remove = shutil.rmtree

    def save(number: int, error: OSError | None = None) -> list[str]:
        def fails(path: Path, ignore_errors: bool = False) -> None:
            if error is None or ignore_errors:
                remove(path, ignore_errors=ignore_errors)
            elif (Path(path) / _manifest.MANIFEST).exists():
                raise error

        moments.fill(number)
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", fails)
            moments.trainer.save(tmp_path / "ck")
        assert hocket.read_state_dict(tmp_path / "ck")["0.bias"].unique().tolist() == [number]
        return sorted(p.name.partition("-")[0] for p in tmp_path.iterdir())

    save(3)
    assert save(4, OSError(39, "Directory not empty")) == ["ck", "ck.lock", "ck.new"]
    assert save(5) == ["ck", "ck.lock"]
    assert not capsys.readouterr().err
    assert save(6, PermissionError(13, "Permission denied")) == ["ck", "ck.kept", "ck.lock"]
    (kept,) = tmp_path.glob("ck.kept-*")
    assert f"cannot be removed: it is kept as {kept.name}" in capsys.readouterr().err
    assert hocket.read_state_dict(kept)["0.bias"].unique().tolist() == [5]


def test_a_lock_outlives_the_children_of_its_process(tmp_path: Path) -> None:
    trainer = linear()
    for _ in range(2):
        trainer.save(tmp_path / "ck")
    assert (tmp_path / "ck.lock").exists()
    child = os.fork()
    if child == 0:
        _lock._unlock()  # as Python's exit does
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "ck.lock").exists()


def faults_on_two_ranks(folder: str) -> list[Any]:
    """What each rank hears when one cannot write, and when one finds other files."""
    rank, path = int(os.environ["RANK"]), Path(folder) / "ck"
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    trainer = hocket.Trainer(
        model, nn.functional.mse_loss, torch.optim.AdamW(model.parameters()), Plan(shard="optimizer")
    )
    trainer.save(path, 1)
    trainer.step((torch.ones(4, 300), torch.ones(4, 300)))
    said: list[Any] = []

    def tried(run: Callable[[], Any]) -> None:
        try:
            said.append(run())
        except CheckpointError as error:
            said.append(str(error))

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # as if its disk were full
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    tried(lambda: trainer.save(path, 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    said.append(sorted(p.name for p in Path(folder).iterdir()))
    tried(lambda: trainer.save(path if rank == 0 else Path(folder) / "elsewhere" / "ck", 3))
    tried(lambda: trainer.load(path if rank == 0 else Path(folder) / "elsewhere" / "ck"))
    tried(lambda: trainer.load(path))
    if rank == 1:
        os.chdir(tempfile.mkdtemp(dir=folder))
        os.rmdir(os.getcwd())
    tried(lambda: trainer.save("ck", 4))
    return said


def test_what_fails_on_one_rank_is_one_error_on_all_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    first, second = run_ranks(faults_on_two_ranks, 2, str(tmp_path), timeout_s=deadline(60))
    assert first == second
    full, names, elsewhere, missing, loaded, removed = first
    assert "cannot be written: rank 1: [Errno 27] File too large" in full
    assert names == ["ck", "ck.lock"]  # the lock of its second save
    assert "all hosts must share one" in elsewhere
    assert "rank 1: there is no checkpoint at" in missing
    assert loaded == 1
    assert removed == "rank 1: 'ck' is in the working directory, which was removed: give an absolute path"


def test_what_is_called_much_like_a_checkpoint_is_not_removed(moments: Moments, tmp_path: Path) -> None:
    names = ["ck.old", "ck.new", "ck.new-best", "ck.old-2026", "ck"]
    for number, name in enumerate(names, 1):
        moments.fill(number)
        moments.trainer.save(tmp_path / name)
    moments.trainer.save(tmp_path / "ck")
    assert [loaded(moments, tmp_path / name) for name in names] == [1, 2, 3, 4, 5]
    shutil.rmtree(tmp_path / "ck")
    assert loaded(moments, tmp_path / "ck") == 0


def test_a_rank_that_outlives_its_job_does_not_write_into_the_next_save(
    moments: Moments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Path] = []

    class Dies(BaseException):
        pass

    def dies(new: Path, path: Path) -> None:
        left.append(new)
        raise Dies

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "replace", dies)
        with pytest.raises(Dies):
            moments.trainer.save(tmp_path / "ck")

    def written_meanwhile(new: Path, path: Path) -> None:
        left[0].mkdir(exist_ok=True)
        (left[0] / "__0_0.distcp").write_bytes(b"late")
        _replace.replace(new, path)

    monkeypatch.setattr(checkpoint, "replace", written_meanwhile)
    moments.fill(7)
    moments.trainer.save(tmp_path / "ck")
    assert loaded(moments, tmp_path / "ck") == 7
    moments.trainer.save(tmp_path / "ck")
    assert len(left) == 1


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kills", "damages", "plans"),
    [
        (1, 4, ["2 data, optimizer"]),
        pytest.param(8, 8, ["2 data, parameters", "2 data, optimizer x 2 tensor"], marks=pytest.mark.long),
    ],
)
def test_ranks_that_are_killed_while_they_save_leave_a_checkpoint(kills: int, damages: int, plans: list[str]) -> None:
    words = [sys.executable, "-m", "benchmarks.checkpoint_kills", "--seed", "3", "--plans", ";".join(plans)]
    words += ["--kills", str(kills), "--damages", str(damages)]
    ran = subprocess.run(words, cwd=CHECKOUT, capture_output=True, text=True, timeout=deadline(240), check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(rf"^{kills} kills in \d+ rounds, seed 3: 0 lost or wrong", ran.stdout, re.MULTILINE)
    (refused,) = re.findall(rf"{damages * len(plans)} damages: (\d+) refused", ran.stdout)
    assert int(refused) >= damages * len(plans) - 2  # a byte between words of the manifest says the same as another


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_mixed_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, reading = Moments(), Moments(), Moments()
    one.fill(1)
    one.trainer.save(tmp_path / "ck")
    other.fill(2)

    def verify_and_replace(self: Any, *args: Any) -> None:
        found(self, *args)
        monkeypatch.setattr(_manifest.Manifest, "verify", found)
        _lock._savers.clear()  # as of another program
        other.trainer.save(tmp_path / "ck")

    found = _manifest.Manifest.verify
    for read in (reading.trainer.load, hocket.read_state_dict):
        monkeypatch.setattr(_manifest.Manifest, "verify", verify_and_replace)
        with pytest.raises(CheckpointError, match="while it was read"):
            read(tmp_path / "ck")


def test_two_programs_that_save_to_one_path_are_told_so_where_no_lock_keeps_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_and_write(self: Any, folder: Path) -> None:
        monkeypatch.setattr(_manifest.Manifest, "write", write)
        other.trainer.save(tmp_path / "ck")
        write(self, folder)

    one, other, write = Moments(), Moments(), _manifest.Manifest.write
    monkeypatch.setattr(_manifest.Manifest, "write", save_and_write)
    with pytest.raises(CheckpointError, match="another program saves to the same path"):
        one.trainer.save(tmp_path / "ck")


def test_trainers_of_a_program_or_of_other_models_lose_no_checkpoint_of_each_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ck, one, other, same = tmp_path / "ck", Moments(), Moments(3), Moments()
    one.trainer.save(ck)
    with pytest.raises(CheckpointError, match="another Trainer of this program has saved there"):
        other.trainer.save(ck)
    same.trainer.load(ck)
    same.fill(4)
    same.trainer.save(ck)  # goes on from there
    with pytest.raises(CheckpointError, match="another Trainer of this program has saved there"):
        one.trainer.save(ck)
    assert "kept" not in capfd.readouterr().err
    del one, same
    other.trainer.save(ck)
    (kept,) = tmp_path.glob("ck.kept-*")
    assert f"{ck} was of another model: it is kept as {kept.name}" in capfd.readouterr().err
    assert hocket.read_state_dict(kept)["0.bias"].unique().tolist() == [4]
    assert len(hocket.read_state_dict(ck)) == 6
    del other
    gc.collect()
    Moments(3).trainer.save(ck)  # as the next run does that begins anew
    assert len(list(tmp_path.iterdir())) == 3


_SAVES = """
import fcntl, os, sys, time
file = open(sys.argv[1], "w+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("process 1 on", sys.argv[2], file=file, end="", flush=True)
print("saves", flush=True)
time.sleep(100)
"""


def test_of_two_programs_that_save_to_one_path_the_second_is_refused(
    moments: Moments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither loses what it has saved, nor what it is saving."""

    def save() -> None:
        moments.trainer.save(tmp_path / "ck")

    started = []

    def other(host: str) -> None:
        command = [sys.executable, "-I", "-S", "-c", _SAVES, str(lock), host]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "saves\n"

    moments.fill(3)
    save()
    assert [p.name for p in tmp_path.iterdir()] == ["ck"]
    lock, unfinished = tmp_path / "ck.lock", tmp_path / f"ck.new-{0:012x}"
    unfinished.mkdir()
    other(socket.gethostname())
    try:
        moments.fill(4)
        for attempt in (save, lambda: moments.trainer.resume(tmp_path / "ck")):
            with pytest.raises(CheckpointError, match=f"process 1 on .* saves to the same path.*remove {lock}"):
                attempt()
        assert unfinished.exists()
        assert hocket.read_state_dict(tmp_path / "ck")["0.bias"].unique().tolist() == [3]
        started[0].kill()
        started[0].wait()
        save()  # its lock went with it
        assert sorted(p.name for p in tmp_path.iterdir()) == ["ck", "ck.lock"]
        # It has saved there again, so that none may take turns with it: two would replace each other's checkpoints.
        turn = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        refused = subprocess.run([sys.executable, "-I", "-S", "-c", turn, str(lock)], capture_output=True, text=True)
        assert "BlockingIOError" in refused.stderr
        _lock._unlock(lock)  # as its end does
        other("another-host")  # it may have died a moment ago
        monkeypatch.setattr("time.sleep", lambda _: (started[1].kill(), started[1].wait()))
        save()
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_what_a_later_torch_has_written_is_said_to_be_so(
    moments: Moments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def more(*_: Any) -> None:
        raise ValueError("too many values to unpack (expected 5)")  # as torch 2.13 has it of 2.15's

    moments.trainer.save(tmp_path)
    monkeypatch.setattr("torch.distributed.checkpoint.metadata.TensorProperties.__setstate__", more)
    with pytest.raises(CheckpointError, match="too many values.*if a later torch than .* wrote it, read it with that"):
        hocket.read_state_dict(tmp_path)


def test_paths_that_python_3_13_has_written_are_read_by_others() -> None:
    assert _reader._MetadataUnpickler(io.BytesIO(b"cpathlib._local\nPosixPath\n.")).load() is PosixPath


def test_members_that_early_pythons_3_11_have_written_are_read_and_nothing_else_is_taken_by_their_getattr() -> None:
    def read(pickled: bytes) -> Any:
        return _reader._MetadataUnpickler(io.BytesIO(b"cbuiltins\ngetattr\n(c" + pickled + b"\ntR.")).load()

    module = b"torch.distributed.checkpoint.metadata\n"
    member = read(module + b"_MEM_FORMAT_ENCODING\nVTORCH_CONTIGUOUS_FORMAT")
    assert repr(member) == "<_MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT: 0>"
    with pytest.raises(KeyError):
        read(module + b"_MEM_FORMAT_ENCODING\nV__class__")
    with pytest.raises(pickle.UnpicklingError, match="does not belong there"):
        read(module + b"Metadata\nV__init__")
