"""What others can reach of a job on one host: nothing."""

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hocket.comm import rendezvous
from hocket.launch._probe import ProbeServer, probe
from hocket.launch._run_directory import LaunchDirectory
from hocket.testing import deadline

from ..processes import free_port, until
from ..strangers import NOBODY, as_another_user, as_root, dribbling, garbage, listening, opened, reached

TRAINS = """
import json, os, pathlib, time, torch, torch.distributed as dist

here = pathlib.Path(os.environ["HOCKET_TEST"])
dist.init_process_group("hocket")
rank = dist.get_rank()
ones = torch.ones(1000)
files = [f"/proc/{os.getpid()}/fd/{name}" for name in os.listdir("/proc/self/fd")]
said = {"pid": os.getpid(), "launcher": os.getppid(), "files": files, "port": int(os.environ["MASTER_PORT"]),
        "place": os.environ["HOCKET_RENDEZVOUS"].split(" ")[1]}
(here / f"part-{rank}").write_text(json.dumps(said))
end = [False]
while not end[0]:
    dist.all_reduce(ones)
    assert ones.eq(2).all()
    ones.fill_(1)
    if not (here / f"said-{rank}").exists():
        (here / f"part-{rank}").rename(here / f"said-{rank}")
    end = [(here / "end").exists()]
    dist.broadcast_object_list(end)
    time.sleep(0.005)  # the processors are for those who attack
dist.destroy_process_group()
dist.init_process_group("hocket")  # a second world of the same ranks
dist.barrier()
dist.destroy_process_group()
print("ok")
"""


@pytest.fixture
def job(hocket: Any, script: Any, tmp_path: Path) -> Any:
    """A job of two ranks that trains until it is told to end; what its ranks said."""
    process = hocket("run", "-n", "2", script(TRAINS))
    until(lambda: process.poll() is not None or all((tmp_path / f"said-{rank}").exists() for rank in range(2)), 60)
    yield [json.loads((tmp_path / f"said-{rank}").read_text()) for rank in range(2)]
    (tmp_path / "end").touch()
    out, err = process.communicate(timeout=deadline(60))
    assert process.returncode == 0, err
    assert out.count("ok") == 2


@pytest.mark.long
def test_nothing_of_a_job_on_one_host_listens_and_another_user_reaches_nothing(job: Any, tmp_path: Path) -> None:
    assert listening([job[0]["launcher"], *(rank["pid"] for rank in job)]) == []
    if os.getuid() != 0:
        pytest.skip("nothing listens; only root can become another user, who could try the rest")
    for above in [tmp_path, *tmp_path.parents]:  # else pytest's own directories would stand in the way
        if above.stat().st_mode & 0o005 != 0o005 and above.owner() == "root":
            above.chmod(0o755)
    place = job[0]["place"]
    directory = os.path.dirname(place)
    memory = [file for rank in job for file in rank["files"]]
    environments = [f"/proc/{rank['pid']}/environ" for rank in job]
    others = [str(path) for path in Path(directory).rglob("*")]
    assert place in others
    assert as_another_user(opened, [directory, *others, *memory, *environments]) == []
    assert as_another_user(reached, [job[0]["port"]]) == []


@pytest.mark.long
def test_two_launchers_meet_by_a_secret_whatever_strangers_send_to_their_ports(
    hocket: Any, script: Any, tmp_path: Path
) -> None:
    """One dribbles bytes into every port from the start on; garbage comes while they train; then he dribbles again."""
    port, path = str(free_port()), script(TRAINS)
    processes = []
    with dribbling("HOCKET_TEST", tmp_path) as ports:
        for number in range(2):
            place = ["--nnodes=2", f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}"]
            environment = {**os.environ, "HOCKET_HOST": f"host{number}", "HOCKET_TIMEOUT": str(deadline(30))}
            processes.append(hocket("run", "-n", "1", *place, path, env=environment))
        ended = [lambda one=one: one.poll() is not None for one in processes]
        until(lambda: any(end() for end in ended) or all((tmp_path / f"said-{rank}").exists() for rank in range(2)), 90)
    pids = [json.loads((tmp_path / f"said-{rank}").read_text())["pid"] for rank in range(2)]
    found = listening([*pids, *(process.pid for process in processes)])
    assert {address for address, _ in found} == {"0100007F"}  # 127.0.0.1, as was named
    garbage([one for _, one in found], 800, seed=3)
    with dribbling("HOCKET_TEST", tmp_path):
        (tmp_path / "end").touch()  # and a second world is made
        for process in processes:
            out, err = process.communicate(timeout=deadline(90))
            assert (process.returncode, out.count("ok")) == (0, 1), err
    assert int(port) in ports  # of the others some take connections for milliseconds only


@as_root
def test_ranks_do_not_meet_where_another_user_could_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, mode, owner in (("loose", 0o755, 0), ("foreign", 0o700, NOBODY)):
        directory = tmp_path / name
        directory.mkdir(mode=mode)
        os.chown(directory, owner, owner)
        place = rendezvous.environment("127.0.0.1", 1, str(directory / "meet"))
        for variable, value in {**place, "RANK": "0", "WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(variable, value)
        with pytest.raises(PermissionError, match=f"{directory} is not a directory of this user alone .mode 0700."):
            dist.init_process_group("hocket")
        assert not dist.is_initialized()


def test_strangers_who_wait_neither_keep_a_probe_out_nor_end_its_server() -> None:
    server = ProbeServer("a secret of the job")
    silent = []
    for _ in range(200):
        silent.append(socket.create_connection(("127.0.0.1", server.port)))
        silent[-1].sendall(b"x")
    threads = sum(thread.name.startswith("Thread-") for thread in threading.enumerate())
    assert threads <= 64 + 20  # those that have been pushed out may still be about to end
    assert probe("127.0.0.1", server.port, "a secret of the job")["problem"] is None
    for one in silent:
        one.close()
    server.close()


def _plant(directory: str, how: str) -> None:
    os.chdir(directory)
    os.mkdir("his", mode=0o777)
    os.rename("his", "runs") if how == "directory" else os.symlink("/etc", "runs")


@as_root
@pytest.mark.parametrize("how", ["directory", "link"])
def test_runs_are_not_kept_where_another_user_has_planted_a_directory(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for above in [tmp_path, *tmp_path.parents]:
        if above.stat().st_mode & 0o005 != 0o005 and above.owner() == "root":
            above.chmod(0o755)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    as_another_user(_plant, str(shared), how)
    monkeypatch.chdir(shared)
    with pytest.raises(PermissionError, match="runs is another user's, in a directory where all may write"):
        LaunchDirectory("runs/train-1", new=True)
    assert LaunchDirectory(str(tmp_path / "runs" / "train-1"), new=True).path == str(tmp_path / "runs" / "train-1")
