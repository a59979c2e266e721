"""MSCCL's XML: what is written is read back to what keeps the same contract, and wrong programs are refused."""

import re
from xml.etree import ElementTree

import pytest

from hocket.schedule import Collective, Schedule, ScheduleError, Step, from_msccl, to_msccl, verify

from .brute_force import halving_doubling, keeps_contract, ring


def program(text):
    """Operations of gpu 0 as MSCCL's papers write them: "s0 rrc7 ..."."""
    gpu = next(gpu for gpu in ElementTree.fromstring(text).iter("gpu") if gpu.get("id") == "0")
    return [f"{s.get('type')}{s.get('dstoff')}" for s in gpu.iter("step")]


def test_the_ring_of_eight_is_msccls_own():
    operations = program(to_msccl(ring(8)))
    assert operations[:5] == ["s0", "rrc7", "s7", "rrc6", "s6"]
    assert operations[13:18] == ["rrc1", "s1", "r0", "s0", "r7"]
    assert operations[-1] == "r2"


@pytest.mark.parametrize(
    "schedule",
    [
        ring(2),
        ring(5),
        halving_doubling(8),
        Schedule("swap", Collective("all_reduce", 2), 1, (Step.of([0, 1], [1, 0], reduce=True),)),
        Schedule(
            "via", Collective("all_to_all", 3), 9,
            (
                Step.of([0, 0, 1, 1, 2], [1, 2, 0, 2, 1], [1, 2, 3, 5, 7], reduce=False),
                Step.of(2, 1, 6, reduce=False),
                Step.of(1, 0, 6, reduce=False),
            ),
        ),
        Schedule(
            "chain", Collective("broadcast", 3, 2), 2,
            (Step.of(2, 0, 0, 2, reduce=False), Step.of(0, 1, 0, 2, reduce=False)),
        ),
        Schedule("direct", Collective("reduce_scatter", 2), 2, (Step.of([0, 1], [1, 0], [1, 0], reduce=True),)),
        Schedule("direct", Collective("all_gather", 2), 4, (Step.of([0, 1], [1, 0], [0, 2], [2, 4], reduce=False),)),
    ],
    ids=lambda s: f"{s.name}-{s.collective}",
)  # fmt: skip
def test_what_is_written_is_read_back(schedule):
    back = from_msccl(to_msccl(schedule))
    assert back.collective == schedule.collective
    assert back.chunks == schedule.chunks
    assert verify(back) == ()
    assert keeps_contract(back)
    assert back.sent() == schedule.sent()
    assert back.step_count <= schedule.step_count  # earliest steps
    assert from_msccl(to_msccl(back)) == back


SCRATCH = """
<algo name="one shot!" proto="LL" nchannels="1" nchunksperloop="1" ngpus="2" coll="allreduce" inplace="1">
  <gpu id="0" i_chunks="1" o_chunks="0" s_chunks="1">
    <tb id="0" send="1" recv="1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="2" type="re" srcbuf="s" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="1" o_chunks="0" s_chunks="1">
    <tb id="0" send="0" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="1"/>
    </tb>
    <tb id="1" send="-1" recv="0" chan="0">
      <step s="0" type="rrc" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="0" deps="0" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""


def test_what_arrives_in_scratch_and_is_reduced_from_there_is_one_transfer():
    schedule = from_msccl(SCRATCH)
    assert schedule.name == "one-shot-"
    assert verify(schedule) == ()
    assert schedule.transfer_count == 2
    assert schedule.step_count == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('type="re"', 'type="red"'), r"gpu 0, tb 0, step 2 \(red\): the type 'red' is unknown"),
        (('coll="allreduce"', 'coll="custom"'), "coll 'custom' is none of allreduce"),
        (('ngpus="2"', ""), "the attribute 'ngpus' is missing"),
        (('cnt="1" depid="0"', 'cnt="x" depid="0"'), "cnt='x' is no whole number"),
        (('depid="0" deps="0"', 'depid="-1" deps="-1"'), "both touch chunk 0 with nothing between them"),
        (('send="0" recv="-1"', 'send="-1" recv="-1"'), r"does not end: gpu 0, tb 0, step 1 \(r\) waits for gpu 1"),
        (('type="re"', 'type="nop"'), r"gpu 0, tb 0, step 1 \(r\): what arrives in s\[0\] is never used"),
        (('step s="2"', 'step s="3"'), "it stands at place 2"),
        (('depid="0" deps="0"', 'depid="3" deps="-1"'), r"tb 1, step 0 \(rrc\): waits for step -1 of tb 3"),
        (('depid="0" deps="0"', 'depid="3" deps="0"'), "does not end: .* waits for"),
        (("<algo", "<algo <"), "no XML"),
    ],
)
def test_wrong_programs_are_refused_with_the_place(change, message):
    with pytest.raises(ScheduleError, match=message):
        from_msccl(SCRATCH.replace(*change, 1))


def test_blocks_that_wait_for_each_other_are_found():
    text = to_msccl(ring(3))
    first = re.search(r'depid="-1" deps="-1"', text)
    assert first
    circle = text[: first.start()] + 'depid="0" deps="3"' + text[first.end() :]
    with pytest.raises(ScheduleError, match=r"does not end: .* waits for tb 0, step 3"):
        from_msccl(circle.replace('hasdep="0"', 'hasdep="1"'))


def test_what_msccl_cannot_say_is_refused():
    switched = Schedule("s", Collective("all_reduce", 1), 1, (), ("top",))
    with pytest.raises(ScheduleError, match="no switches"):
        to_msccl(switched)
    with pytest.raises(ScheduleError, match="MSCCL has no gather"):
        to_msccl(Schedule("g", Collective("gather", 1), 1, ()))
