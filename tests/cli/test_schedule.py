"""`hocket schedule`: files in and out, JSON, and errors; what it prints stands in tests/golden."""

import json
import os
import threading
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

from hocket.algorithms import get
from hocket.cli.schedule import schedule
from hocket.schedule import Collective, from_json, from_msccl, parse


def run(*words):
    return CliRunner().invoke(schedule, [str(word) for word in words])


def test_json_and_text_are_read_back_as_the_same_schedule(tmp_path):
    ring = get("ring")(Collective("all_reduce", 6))
    assert from_json(run("show", "ring", "-n", "6", "--json").stdout) == ring
    text = run("show", "ring", "-n", "6", "--text").stdout
    assert parse(text) == ring
    for name, content in {"ring.txt": text, "ring.json": run("show", "ring", "-n", "6", "--json").stdout}.items():
        (tmp_path / name).write_text(content)
        assert parse(run("show", tmp_path / name, "--text").stdout) == ring


def test_pictures_and_msccl_are_written(tmp_path):
    result = run(
        "show", "double_tree", "pieces=2", "-n", "4", "--svg", tmp_path / "a.svg", "--msccl", tmp_path / "a.xml"
    )
    assert result.exit_code == 0, result.output
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert from_msccl((tmp_path / "a.xml").read_text()).collective == Collective("all_reduce", 4)
    assert run("verify", tmp_path / "a.xml").exit_code == 0


def test_verify_says_all_as_json():
    document = json.loads(run("verify", "hdrm", "--cluster", "bigraph:upper=2,ports=2", "--json").stdout)
    assert document["keeps_contract"] is True
    assert document["findings"] == []
    assert document["closed_form"] == {"steps": 6, "sent": 1.75, "agrees": True}
    assert {load["most_flows"] for load in document["links"]} == {1}


def test_a_broken_schedule_has_exit_code_1(tmp_path):
    text = run("show", "ring", "-n", "3", "--text").stdout.replace("1 -> 2 copy 2", "1 -> 0 copy 2")
    (tmp_path / "bad.txt").write_text(text)
    result = run("verify", tmp_path / "bad.txt", "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["keeps_contract"] is False
    assert document["findings"][0]["kind"] == "missing"


def test_time_predicts_and_writes_a_trace(tmp_path):
    words = ("--bytes", "1KiB,1MiB", "--cluster", "star:hosts=4,bandwidth=100Gbit/s", "--json")
    result = run("time", "ring", *words, "--trace", tmp_path / "trace.json")
    assert result.exit_code == 0, result.output
    small, large = json.loads(result.stdout)["rows"]
    assert 0 < small["seconds"] < large["seconds"]
    assert large["busbw_Bps"] == pytest.approx(1.5 * large["algbw_Bps"])
    assert large["busbw_Bps"] < 12.5e9
    for name in ("trace.json", "trace.1KiB.json"):
        assert json.loads((tmp_path / name).read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("show", "nope"), "algorithm 'nope' is unknown; there are one_shot"),
        (("verify", "1F1B"), "'1F1B' is unknown; the order of a pipeline is called 1f1b"),
        (("show", "zero-buble"), "the order of a pipeline is called zero_bubble"),
        (("show", "ring", "rings=x"), "ring: rings='x' is no whole number; the default is 1"),
        (("show", "absent.json"), "'absent.json' cannot be read"),
        (("show", "ring", "--collective", "all_reduse"), "collective 'all_reduse' is unknown"),
        (("show", "bruck"), "bruck serves all_to_all, not all_reduce"),
        (("verify", "hdrm", "--cluster", "star:hosts=8"), "hdrm needs a BiGraph"),
        (("time", "ring", "--bytes", "1QiB", "--cluster", "star:hosts=4"), "1QiB"),
        (
            ("time", "ring", "-n", "9", "--bytes", "1", "--cluster", "star:hosts=4"),
            "needs rank 8",
        ),
        (("show", "ring", "--svg", "/absent/a.svg"), "cannot be written"),
        (("show", "aggregation_tree", "--msccl", "a.xml"), "MSCCL has no switches"),
        (("show", "1f1b", "--stages", "4", "--svg", "a.svg"), "--svg: an order of a pipeline has none"),
        (("time", "1f1b", "--message", "50ms", "--cluster", "star:hosts=4"), "--message is for an order without"),
        (("show", "ring", "-n", "99999999"), "Invalid value for '-n'"),
        (("show", "a" * 300), "is unknown; there are"),
        (("show", "ring", "--cluster", "a" * 300), "is no cluster"),
        (("verify", "1f1b", "--in-flight", "nan"), "--in-flight nan: give a number of micro-batches"),
        (("verify", "1f1b", "--in-flight", "-1"), "--in-flight -1: give a number"),
        (("verify", "1f1b", "--stages", "100000", "--micro-batches", "100000"), "10,000,000,000 forwards"),
    ],
)
def test_bad_input_is_one_error_and_exit_code_2(words, text):
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert text in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("words", [("-n", "8"), ("--collective", "all_gather")])
def test_a_file_of_another_schedule_than_was_asked_for_is_refused(tmp_path, words):
    (tmp_path / "ring.txt").write_text(run("show", "ring", "-n", "4", "--text").output)
    asked = ("time", str(tmp_path / "ring.txt"), "--bytes", "1MiB", "--cluster", "star:hosts=8")
    assert run(*asked).exit_code == 0
    result = run(*asked, *words)
    assert result.exit_code == 2
    assert "is all_reduce world=4" in result.output


@pytest.mark.parametrize(
    "words", ["one_shot", "direct", "pairwise --collective all_to_all", "bruck --collective all_to_all"]
)
def test_a_schedule_that_memory_does_not_hold_is_refused_before_it_is_made(words):
    result = run("show", *words.split(), "-n", "30000")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "transfers is more than memory holds; ask for less, such as fewer ranks" in result.stderr


def test_a_schedule_that_is_too_large_to_verify_is_refused_at_once():
    result = run("verify", "ring", "-n", "1000000")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "1,999,998,000,000 transfers are too many to verify at once; ask for less" in result.stderr


@pytest.mark.parametrize("parameter", ["pieces=99999999999999999999", f"pieces={'9' * 5000}", "pieces=1000001"])
def test_a_parameter_that_no_schedule_holds_is_refused(parameter):
    result = run("show", "double_tree", parameter, "-n", "8")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is too large; give 1,000,000 at most" in result.stderr


def test_a_pipe_is_read_once(tmp_path):
    pipe, text = tmp_path / "pipe", run("show", "ring", "-n", "3", "--text").stdout
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(text,), daemon=True)
    writer.start()
    assert run("verify", pipe).exit_code == 0
    writer.join()
