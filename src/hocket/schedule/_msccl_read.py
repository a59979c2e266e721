"""Reads MSCCL XML, the classic form: programs of thread blocks, matched, ordered and made transfers.

A program can be wrong where a schedule cannot: a receive may have no send, blocks may wait for each other in a circle,
two operations may touch one chunk with nothing that orders them, and the result may lie where it should not. Each is an
error here, with the place (`_msccl_program.py`, `_msccl_check.py`): what is judged is the program itself. What is left
is read as a schedule: MSCCL's buffers become the one buffer of a rank (`_msccl_buffers.py`), and operations get the
earliest steps that keep their order.
"""

from typing import Final
from xml.etree import ElementTree

from ._collective import Collective, ScheduleError
from ._ir import Schedule, Step
from ._msccl_buffers import MscclBuffers, MscclMessage, Touches
from ._msccl_check import check_connections, check_program
from ._msccl_program import RECEIVES, MscclOperation, MscclPlaces, blocks_of, number_of, run, text_of
from ._msccl_write import NAMES

_KINDS: Final = {name: kind for kind, name in NAMES.items()} | {"reducescatter": "reduce_scatter"}

_MOST_MOVED: Final = 1 << 20  # chunks, each of which takes a kilobyte and a tenth of a millisecond


def from_msccl(text: str) -> Schedule:
    """Read MSCCL XML.

    Args:
        text: An `algo` element in the classic form; scratch buffers may hold chunks that are passed on or reduced.

    Raises:
        MemoryError: more than 2**20 chunks are received in all.
        ScheduleError: no such XML, a receive without a send, waits in a circle, chunks touched in no order, a result
            that is not the collective's, or a rank that needs two values of one chunk at once, which schedules do not
            have.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ScheduleError(f"no XML: {error}") from None
    if root.tag != "algo":
        raise ScheduleError(f"the XML is of <{root.tag}>; give MSCCL's <algo>, without a namespace")
    name, coll = text_of(root, "name"), text_of(root, "coll")
    if coll not in _KINDS:
        raise ScheduleError(f"algo {name!r}: coll {coll!r} is none of {', '.join(_KINDS)}")
    collective = Collective(_KINDS[coll], number_of(root, "ngpus"), number_of(root, "root", 0))
    chunks = _chunks(root, collective)
    blocks = blocks_of(root, collective.world)
    ordered, sent = run(blocks)
    check_connections(blocks, collective.world)
    _check_moved(collective, chunks, ordered)
    places = MscclPlaces(collective, chunks // collective.blocks, number_of(root, "inplace", 0) == 1)
    messages, touches = MscclBuffers(places, chunks).follow(ordered, sent)
    check_program(root, places, chunks, ordered, sent)
    steps = _steps(_ordered(messages, touches))
    plain = "".join(c if c.isalnum() or c in "_." else "-" for c in name)
    return Schedule(plain, collective, chunks, steps).merged()


def _ordered(messages: list[MscclMessage], touches: Touches) -> list[tuple[MscclMessage, int]]:
    """Give each message the earliest step that keeps the order of what touches each chunk at each rank."""
    reads: dict[tuple[int, int, int], list[int]] = {}
    writes: dict[tuple[int, int, int], list[int]] = {}
    for number, message in enumerate(messages):
        reads.setdefault((message.source, message.chunk, message.read.order), []).append(number)
        writes.setdefault((message.destination, message.chunk, message.written.order), []).append(number)
    edges: list[tuple[int, int, int]] = []  # from, to, at least so many steps later
    for (gpu, chunk), row in touches.items():
        events = [
            (number, wrote)
            for one, wrote in row
            for number in (writes if wrote else reads).get((gpu, chunk, one.order), ())
        ]
        for position, (later, later_writes) in enumerate(events):
            for earlier, earlier_wrote in events[:position]:
                if later == earlier or not (later_writes or earlier_wrote):
                    continue
                both_add = later_writes and messages[later].reduce and messages[earlier].reduce
                edges.append((earlier, later, int(earlier_wrote and not both_add)))
    steps = [0] * len(messages)
    for _ in range(len(messages) + 1):
        changed = False
        for before, after, gap in edges:
            if steps[after] < steps[before] + gap:
                steps[after] = steps[before] + gap
                changed = True
        if not changed:
            return list(zip(messages, steps, strict=True))
    raise ScheduleError(
        "the order of its operations cannot be expressed in steps: a send reads long before it is received"
    )


def _steps(messages: list[tuple[MscclMessage, int]]) -> tuple[Step, ...]:
    steps = []
    for number in sorted({step for _, step in messages}):
        rows = [one for one, step in messages if step == number]
        source, destination, chunk, reduce = zip(
            *((m.source, m.destination, m.chunk, m.reduce) for m in rows), strict=True
        )
        steps.append(Step.of(source, destination, chunk, reduce=reduce))
    return tuple(steps)


def _chunks(root: ElementTree.Element, collective: Collective) -> int:
    """Return the chunks of the whole row, from `nchunksperloop` or the buffers' sizes."""
    sizes = [number_of(gpu, name, 0) for gpu in root.iter("gpu") for name in ("i_chunks", "o_chunks")]
    vector = number_of(root, "nchunksperloop", max(sizes, default=0))
    if vector < 1 or vector % collective.vector_blocks:
        raise ScheduleError(f"nchunksperloop={vector}: {collective} needs a multiple of {collective.vector_blocks}")
    return vector * collective.blocks // collective.vector_blocks


def _check_moved(collective: Collective, chunks: int, ordered: list[MscclOperation]) -> None:
    """Raise ScheduleError if less is received than the collective needs, before anything is made for every chunk."""
    at_home = chunks // collective.world if collective.kind == "all_to_all" else 0
    needed = chunks - at_home if collective.world > 1 else 0
    moved = sum(one.count for one in ordered if one.verb in RECEIVES)
    if moved > _MOST_MOVED:
        raise MemoryError(f"{moved:,} chunks that are received are too many to follow at once")
    if moved < needed:
        raise ScheduleError(
            f"the program breaks the contract of {collective}: {moved} chunks are received in all, and {chunks} make "
            "the whole; see nchunksperloop"
        )
