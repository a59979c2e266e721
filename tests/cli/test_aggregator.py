import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from hocket.aggregator import AggregationClient, ElementType, Kind, Operator, parse_address
from hocket.cli import _application, main
from hocket.launch import _aggregator
from hocket.testing import deadline


def _run(*arguments):
    return CliRunner().invoke(_application("aggregator"), ["aggregator", *map(str, arguments)])


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text("0123456789abcdef")
    return path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_end_and_says_what_it_has_done(token, tmp_path, number):
    address_file = tmp_path / "address"
    process = subprocess.Popen(
        [sys.executable, "-m", "hocket", "aggregator", "--listen", "127.0.0.1:0", "--json", "--window", "1MiB"]
        + ["--token-file", str(token), "--address-file", str(address_file), "--max-operations", "3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + deadline(20)
        while not address_file.exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        client = AggregationClient(parse_address(address_file.read_text().strip()), b"0123456789abcdef")
        assert client.welcome.window_nbytes == 1 << 20
        assert client.welcome.operations == 3
        group = client.join("alone", 1, 0)
        group.wait(deadline(5))
        data = np.arange(10, dtype=np.int32)
        result = np.zeros_like(data)
        group.post(
            Kind.ALL_REDUCE,
            data.view(np.uint8),
            result.view(np.uint8),
            operator=Operator.SUM,
            element=ElementType.INT32,
        ).wait()
        assert np.array_equal(result, data)
        process.send_signal(number)
        out, err = process.communicate(timeout=deadline(10))
    finally:
        process.kill()
        process.wait()
    client.close()
    assert process.returncode == 0
    assert "listening at 127.0.0.1:" in err
    assert json.loads(out)["operations"] == {"all_reduce": 1}


def test_it_does_not_load_torch(token):
    code = "import sys, hocket.aggregator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"--listen": "7070"}, "'7070' is no address; write HOST:PORT"),
        ({"--listen": "127.0.0.1:99999"}, "is no address"),
        ({"--listen": "198.51.100.1:7070"}, "cannot listen at 198.51.100.1:7070"),
        ({"--token-file": "absent"}, "'absent' cannot be read"),
        ({"--parent": "up"}, "'up' is no address"),
        ({"--window": "many"}, "many"),
        ({"--max-groups": "0"}, "groups is 0; give 1 or more"),
        ({"--window": "4GiB"}, "give less than 4 GiB"),
    ],
)
def test_bad_input_is_one_error_with_the_remedy(token, change, text):
    given = {"--listen": "127.0.0.1:0", "--token-file": str(token), **change}
    result = _run(*[word for pair in given.items() for word in pair])
    assert result.exit_code == 2
    assert text in result.output


def test_a_token_that_others_can_read_or_guess_is_refused(token):
    token.chmod(0o644)
    assert "chmod it to 600" in _run("--listen", "127.0.0.1:0", "--token-file", token).output
    token.chmod(0o600)
    token.write_text("short\n")
    assert "16 is the least" in _run("--listen", "127.0.0.1:0", "--token-file", token).output
    token.write_text("\n")
    assert "holds no token" in _run("--listen", "127.0.0.1:0", "--token-file", token).output


SCRIPT = """
import os, pathlib, signal, time, torch, torch.distributed as dist
from hocket import comm
os.environ["HOCKET_HOST"] = "host" + os.environ["RANK"]
dist.init_process_group("hocket")
def check():
    data = torch.ones(1000)
    dist.all_reduce(data)
    assert (data == 2).all()
check()
print("served", [one.served for one in comm.aggregation_stats().values()])
print("token", os.environ["HOCKET_AGGREGATOR_TOKEN_FILE"])
if dist.get_rank() == 0:
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\\0")
        except OSError:
            continue
        if os.environ["HOCKET_AGGREGATOR_TOKEN_FILE"].encode() in words:
            os.kill(int(path.parent.name), signal.SIGKILL)
here = 0.0
while here < 2:  # both ranks are back
    check()
    back = torch.tensor([float(any(one.returns for one in comm.aggregation_stats().values()))])
    dist.all_reduce(back)
    here = back.item()
check()
print("back")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def job(hocket_forked, tmp_path_factory):
    """Two ranks with an aggregator beside them, which rank 0 kills."""
    script = tmp_path_factory.mktemp("job") / "train.py"
    script.write_text(SCRIPT)
    done = hocket_forked("run", "-n", "2", "--aggregate", str(script), cwd=script.parent)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.long
def test_run_starts_one_beside_the_ranks_and_leaves_nothing(job):
    assert job.stdout.count("served [1]") == 2
    token_file = job.stdout.split("token ")[1].split()[0]
    assert not os.path.exists(token_file)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                assert token_file.encode() not in file.read()
        except OSError:
            continue


def test_run_starts_a_killed_one_again_and_the_ranks_come_back(job):
    assert job.stdout.count("back") == 2
    assert "the aggregator is started again: aggregator at 127.0.0.1, which ended (SIGKILL)" in job.stderr


def test_run_starts_one_that_cannot_start_again_five_times_ever_later_and_says_why_it_leaves_it(monkeypatch, tmp_path):
    python = tmp_path / "python"  # listens at first, as it seems; finds its port taken afterwards
    python.write_text(
        '#!/bin/sh\nwhile [ "$1" != --address-file ]; do shift; done\n[ ! -e "$2" ] || { echo taken >&2; exit 2; }\n'
        'echo 127.0.0.1:1 > "$2"; sleep 0.1'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    now_s = [0.0]
    monkeypatch.setattr(_aggregator, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=time.sleep))
    started = []
    aggregators = _aggregator.Aggregators(SimpleNamespace(directory=str(tmp_path), name="", add_rank=started.append))
    said = []
    while now_s[0] < 40:
        if os.path.exists(f"/proc/{started[-1]}"):
            os.waitid(os.P_PID, started[-1], os.WEXITED | os.WNOWAIT)
        said += [(now_s[0], sentence) for sentence in aggregators.revive()]
        now_s[0] += 0.5
    assert [when_s for when_s, _ in said] == [0.0, 1.0, 4.0, 11.0, 26.0, 26.5]
    assert "is started again: aggregator at 127.0.0.1, which ended (exit status 2: taken)" in said[1][1]
    assert "is not started again" in said[-1][1]
    assert "taken" in said[-1][1]
    assert len(started) == 6


def test_run_refuses_aggregate_for_several_hosts(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--nnodes", "2", "--aggregate", str(script)])
    assert ended.value.code == 2
    assert "--aggregate is for one host" in capfd.readouterr().err


@pytest.mark.parametrize("place", ["absent/address", "."])
def test_an_address_that_cannot_be_written_is_one_error(token, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    ended = _run("--listen", "127.0.0.1:0", "--token-file", token, "--address-file", place)
    assert ended.exit_code == 2
    assert f"--address-file '{place}' cannot be written" in ended.output
