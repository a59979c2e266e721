"""MSCCL's XML: what is written is read back to what keeps the same contract, and wrong programs are refused."""

import random
import re
from xml.etree import ElementTree

import pytest

from hocket.schedule import Collective, Schedule, ScheduleError, Step, from_msccl, to_msccl, verify

from .brute_force import halving_doubling, keeps_contract, ring
from .msccl_interpreter import is_right


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


def _all_pairs(world: int) -> str:
    """All ranks send their input to each other's scratch; one block adds all up in the output."""

    def step(number, verb, source, target, wait=(-1, -1)):
        places = f'srcbuf="{source[0]}" srcoff="{source[1]}" dstbuf="{target[0]}" dstoff="{target[1]}"'
        waits = f'depid="{wait[0]}" deps="{wait[1]}" hasdep="{int(verb == "r")}"'
        return f'<step s="{number}" type="{verb}" {places} cnt="1" {waits}/>'

    gpus = ""
    for rank in range(world):
        others = [peer for peer in range(world) if peer != rank]
        blocks = "".join(
            f'<tb id="{block}" send="{peer}" recv="{peer}" chan="0">'
            + step(0, "s", ("i", 0), ("i", 0)) + step(1, "r", ("i", 0), ("s", block)) + "</tb>"
            for block, peer in enumerate(others)
        )  # fmt: skip
        adds = "".join(step(1 + block, "re", ("s", block), ("o", 0), (block, 1)) for block in range(len(others)))
        blocks += f'<tb id="{world}" send="-1" recv="-1" chan="0">{step(0, "cpy", ("i", 0), ("o", 0))}{adds}</tb>'
        gpus += f'<gpu id="{rank}" i_chunks="1" o_chunks="1" s_chunks="{len(others)}">{blocks}</gpu>'
    head = f'name="pairs" proto="LL" nchannels="1" nchunksperloop="1" ngpus="{world}" coll="allreduce" inplace="0"'
    return f"<algo {head}>{gpus}</algo>"


@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_sum_in_the_output_may_come_before_the_input_is_sent_to_all(world):
    """Nothing orders both, nor need it: they are two buffers. All but two ranks had been refused."""
    schedule = from_msccl(_all_pairs(world))
    assert verify(schedule) == ()
    assert schedule.transfer_count == world * (world - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('type="re"', 'type="red"'), r"gpu 0, tb 0, step 2 \(red\): the type 'red' is unknown"),
        (('coll="allreduce"', 'coll="custom"'), "coll 'custom' is none of allreduce"),
        (('ngpus="2"', ""), "the attribute 'ngpus' is missing"),
        (('cnt="1" depid="0"', 'cnt="x" depid="0"'), "cnt='x' is no whole number"),
        (('depid="0" deps="0"', 'depid="-1" deps="-1"'), r"both touch i\[0\] with nothing between them"),
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


VIA = Schedule(
    "via", Collective("all_to_all", 3), 18,
    (
        Step.of([0, 0, 1, 1, 2], [1, 2, 0, 2, 1], [2, 4, 6, 10, 14], [4, 6, 8, 12, 16], reduce=False),
        Step.of(2, 1, 12, 14, reduce=False),
        Step.of(1, 0, 12, 14, reduce=False),
    ),
)  # fmt: skip
ALL_TO_ALL = to_msccl(
    Schedule(
        "direct", Collective("all_to_all", 3), 9,
        (Step.of([0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1], [1, 2, 3, 5, 6, 7], reduce=False),),
    )
)  # fmt: skip
PROGRAMS = (
    SCRATCH,
    *map(
        to_msccl,
        (
            ring(3),
            ring(4),
            halving_doubling(4),
            VIA,
            Schedule(
                "direct", Collective("reduce_scatter", 2), 4,
                (Step.of([0, 1], [1, 0], [2, 0], [4, 2], reduce=True),),
            ),
            Schedule(
                "ring", Collective("all_gather", 3), 3,
                (Step.of(range(3), [1, 2, 0], range(3), reduce=False, repeat=2, shift=-1),),
            ),
            Schedule(
                "chain", Collective("broadcast", 3, 2), 2,
                (Step.of(2, 0, 0, 2, reduce=False), Step.of(0, 1, 0, 2, reduce=False)),
            ),
        ),
    ),
)  # fmt: skip


def mutants(count, seed=0):
    """Programs of which one or two attributes were changed, or steps exchanged."""
    rng = random.Random(seed)
    for _ in range(count):
        root = ElementTree.fromstring(rng.choice(PROGRAMS))
        for _ in range(rng.choice((1, 1, 2))):
            blocks, steps = list(root.iter("tb")), list(root.iter("step"))
            way = rng.randrange(11)
            if way == 10:
                root.set("inplace", "1" if root.get("inplace") == "0" else "0")
            elif way == 0:
                block = rng.choice(blocks)
                block.set(rng.choice(("send", "recv", "chan", "id")), str(rng.randrange(-1, 3)))
            elif way == 1:
                block = rng.choice(blocks)
                inside = list(block)
                a, b = rng.choice(inside), rng.choice(inside)
                (one, other) = (dict(a.attrib), dict(b.attrib))
                a.attrib.update(other, s=one["s"])
                b.attrib.update(one, s=other["s"])
            else:
                step = rng.choice(steps)
                field = rng.choice(
                    (
                        "srcoff",
                        "dstoff",
                        "srcoff",
                        "dstoff",
                        "srcbuf",
                        "dstbuf",
                        "type",
                        "cnt",
                        "depid",
                        "deps",
                        "hasdep",
                    )
                )
                values = {
                    "type": ("s", "r", "rrc", "rcs", "rrs", "rrcs", "cpy", "re", "nop"), "cnt": "0123",
                    "srcbuf": "ios", "dstbuf": "ios", "depid": ("-1", "0", "1", "2"), "hasdep": "01",
                }  # fmt: skip
                step.set(field, rng.choice(values.get(field, [str(n) for n in range(-1, 6)])))
        yield ElementTree.tostring(root, encoding="unicode")


def judged(text):
    """Whether the reader keeps a program."""
    try:
        return verify(from_msccl(text)) == ()
    except ScheduleError:
        return False


def check_mutants(count, seed):
    kept = 0
    for number, text in enumerate(mutants(count, seed)):
        if judged(text):
            kept += 1
            assert is_right(text, random.Random(number)), text
    return kept


def test_of_mutated_programs_no_wrong_one_is_kept():
    assert all(judged(text) and is_right(text, random.Random(0)) for text in PROGRAMS)
    assert check_mutants(300, seed=1) > 60  # what a mutation did not change, or not for the worse


@pytest.mark.long
def test_of_1700_mutated_programs_no_wrong_one_is_kept():
    assert check_mutants(1700, seed=2) > 340


def changed(text, old, new, count=1):
    assert old in text
    return text.replace(old, new, count)


OVERLAP = """
<algo name="overlap" nchunksperloop="1" ngpus="2" coll="broadcast" inplace="1">
  <gpu id="0" i_chunks="1" o_chunks="0" s_chunks="3">
    <tb id="0" send="1" recv="-1" chan="0">
      <step s="0" type="cpy" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="cpy" srcbuf="s" srcoff="0" dstbuf="s" dstoff="1" cnt="2" depid="-1" deps="-1" hasdep="0"/>
      <step s="2" type="s" srcbuf="s" srcoff="2" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="1" o_chunks="0" s_chunks="0">
    <tb id="0" send="-1" recv="0" chan="0">
      <step s="0" type="r" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # rank 1 gets chunk 0 of an all-gather into output 1
        (changed(PROGRAMS[6], 'type="r" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0"',
                 'type="r" srcbuf="o" srcoff="0" dstbuf="o" dstoff="1"'), r"which holds nothing"),
        # a reduction adds chunk 0 to chunk 1
        (changed(PROGRAMS[2], 'type="rrc" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0"',
                 'type="rrc" srcbuf="i" srcoff="1" dstbuf="i" dstoff="0"'), "does not hold|both touch|holds nothing"),
        (changed(SCRATCH, 'hasdep="1"', 'hasdep="0"'), "which says hasdep=0"),
        (changed(SCRATCH, '<tb id="1" send="-1"', '<tb id="0" send="-1"'), "two thread blocks 0"),
        (changed(SCRATCH, '<tb id="1" send="-1"', '<tb id="1" send="0"'), "share the connection send=0"),
        (changed(SCRATCH, 's_chunks="1"', 's_chunks="0"'), r"s\[0\] lies outside"),
        (changed(SCRATCH, 'i_chunks="1"', 'i_chunks="0"', 2), r"i\[0\] lies outside"),
        # of three ranks each sends a block that another block's receive may have written before
        (changed(ALL_TO_ALL, 'inplace="0"', 'inplace="1"'), r"both touch i\[0\]"),
        # what is copied second may be what was copied first, or what was there before
        (OVERLAP, "that it reads itself"),
        (changed(SCRATCH, "</algo>", '<gpu id="0" s_chunks="9"/></algo>'), r"must stand once, and not \[0, 1, 0\]"),
        (SCRATCH.replace('chan="0"', 'chan="1"'), "they are 0 to 0"),
        (changed(PROGRAMS[1], 'nchunksperloop="3"', 'nchunksperloop="0"'), "nchunksperloop=0"),
        (changed(PROGRAMS[6], 'nchunksperloop="3"', 'nchunksperloop="2"'), "needs a multiple of 3"),
        (changed(PROGRAMS[1], 'nchunksperloop="3"', 'nchunksperloop="1000000000"'), "12 chunks are received in all"),
        (changed(PROGRAMS[1], 'chan="0"', 'chan="x"'), "chan='x' is no whole number"),
        (changed(PROGRAMS[1], 'inplace="1"', 'inplace="true"'), "inplace='true' is no whole number"),
        (changed(PROGRAMS[1], "<algo", '<algo xmlns="urn:m"'), "without a namespace"),
    ],
)  # fmt: skip
def test_programs_that_compute_something_else_are_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        from_msccl(text)


def test_a_program_of_more_chunks_than_memory_holds_is_refused_at_once():
    text = PROGRAMS[1].replace('cnt="1"', 'cnt="100000000"')
    with pytest.raises(MemoryError, match="too many to follow"):
        from_msccl(changed(text, 'nchunksperloop="3"', 'nchunksperloop="300000000"'))


def test_a_block_that_is_copied_onto_itself_orders_nothing():
    """An all-gather out of place copies a rank's own block; said to be in place, the copy does nothing."""
    own = '<tb id="9" send="-1" recv="-1" chan="0"><step s="0" type="cpy" srcbuf="i" srcoff="0" dstbuf="o" dstoff="{}"'
    text = to_msccl(Schedule("swap", Collective("all_gather", 2), 2, (Step.of([0, 1], [1, 0], [0, 1], reduce=False),)))
    for rank in (0, 1):
        block = own.format(rank) + ' cnt="1" depid="-1" deps="-1" hasdep="0"/></tb>'
        text = re.sub(rf'(<gpu id="{rank}"[^>]*>)', rf"\1{block}", text)
    text = text.replace('i_chunks="0"', 'i_chunks="1"')
    assert is_right(text, random.Random(0))
    assert verify(from_msccl(text)) == ()


def test_an_all_to_all_in_place_of_two_ranks_is_read():
    """A block that goes is replaced by the one that comes, and a rank's own stays where it is."""
    swap = Schedule("swap", Collective("all_to_all", 2), 4, (Step.of([0, 1], [1, 0], [1, 2], reduce=False),))
    text = changed(to_msccl(swap), 'inplace="0"', 'inplace="1"')
    assert is_right(text, random.Random(0))
    assert from_msccl(text).merged() == swap


def test_an_operation_of_nothing_takes_no_time():
    assert verify(from_msccl(changed(to_msccl(halving_doubling(4)), 'cnt="0"', 'cnt="1000000000000"'))) == ()
