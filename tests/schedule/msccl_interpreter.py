"""A second, naive reading of MSCCL XML: thread blocks in any order on real buffers, as MSCCL's runtime has them."""

import random
from collections import Counter, deque
from xml.etree import ElementTree


class Broken(Exception):
    """The program does not end, leaves its buffers, or computes something else."""


def run(text, choose):
    """Run a program once; `choose` says which of the thread blocks that can go on does."""
    root = ElementTree.fromstring(text)
    kind, world, loop = root.get("coll"), int(root.get("ngpus")), int(root.get("nchunksperloop"))
    in_place = root.get("inplace") == "1"
    share = loop // world if kind in ("allgather", "reduce_scatter", "alltoall") else loop
    length = {"i": share if kind == "allgather" else loop, "o": share if kind == "reduce_scatter" else loop}
    memory, scratch = {}, {}
    for gpu in root.iter("gpu"):
        rank = int(gpu.get("id"))
        if rank in scratch:
            raise Broken("a gpu twice")
        scratch[rank] = int(gpu.get("s_chunks"))

    def cell(rank, buffer, offset):
        limit = scratch.get(rank, 0) if buffer == "s" else length.get(buffer, 0)
        if not 0 <= offset < limit:
            raise Broken(f"{buffer}[{offset}] of {rank}")
        if in_place and buffer != "s":
            move = rank * share if (kind, buffer) in (("allgather", "i"), ("reduce_scatter", "o")) else 0
            return rank, "io", offset + move
        return rank, buffer, offset

    for rank in range(world):
        if kind == "broadcast" and rank != int(root.get("root")):
            continue
        for offset in range(length["i"]):
            memory[cell(rank, "i", offset)] = Counter({(rank, offset): 1})
    blocks, ends = {}, set()
    for gpu in root.iter("gpu"):
        for tb in gpu.iter("tb"):
            key = int(gpu.get("id")), int(tb.get("id"))
            if key in blocks:
                raise Broken("a thread block twice")
            for way in ("send", "recv"):
                end = (key[0], way, int(tb.get(way)), tb.get("chan"))
                if end in ends and end[2] >= 0:
                    raise Broken("a connection of two thread blocks")
                ends.add(end)
            blocks[key] = [tb, list(tb.iter("step")), 0]
    lanes, posted = {}, {}

    def ready(key):
        tb, steps, done = blocks[key]
        if done == len(steps):
            return False
        step = steps[done]
        if int(step.get("s")) != done:
            raise Broken("steps out of order")
        if (dep := int(step.get("depid"))) >= 0 and posted.get((key[0], dep), -1) < int(step.get("deps")):
            return False
        kind = step.get("type")
        lane = lanes.get((int(tb.get("recv")), key[0], tb.get("chan")))
        return bool(lane) if kind in ("r", "rcs", "rrs", "rrc", "rrcs") else True

    def go(key):
        tb, steps, done = blocks[key]
        step = steps[done]
        verb, count = step.get("type"), int(step.get("cnt"))
        sources, targets = (
            [(key[0], step.get(f"{side}buf"), int(step.get(f"{side}off")) + k) for k in range(count)]
            for side in ("src", "dst")
        )
        if verb in ("r", "rcs", "rrs", "rrc", "rrcs"):
            arrived = lanes[int(tb.get("recv")), key[0], tb.get("chan")].popleft()
            if len(arrived) != count:
                raise Broken("counts differ")
        else:
            arrived = [Counter()] * count
        unknown = Counter({("garbage", random.random()): 1})
        out = []
        for k in range(count if verb != "nop" else 0):
            value = Counter(arrived[k])
            if verb in ("s", "cpy", "re", "rrs", "rrc", "rrcs"):
                value.update(memory.get(cell(*sources[k]), unknown))
            if verb == "re":
                value.update(memory.get(cell(*targets[k]), unknown))
            if verb in ("r", "rcs", "cpy", "re", "rrc", "rrcs"):
                memory[cell(*targets[k])] = value
            out.append(value)
        if verb in ("s", "rcs", "rrs", "rrcs"):
            if not 0 <= int(tb.get("send")) < world or int(tb.get("send")) == key[0]:
                raise Broken("sends to nobody")
            lanes.setdefault((key[0], int(tb.get("send")), tb.get("chan")), deque()).append(out)
        blocks[key][2] += 1
        if step.get("hasdep") == "1":
            posted[key] = done

    while True:
        able = [key for key in blocks if ready(key)]
        if not able:
            break
        go(choose(able))
    if any(done < len(steps) for _, steps, done in blocks.values()) or any(lanes.values()):
        raise Broken("does not end")
    for rank in range(world):
        for offset in range(length["o"]):
            if kind == "reduce" and rank != int(root.get("root")):
                continue
            if kind == "allgather":
                wanted = {(offset // share, offset % share): 1}
            elif kind == "alltoall":
                wanted = {(offset // share, rank * share + offset % share): 1}
            elif kind == "broadcast":
                wanted = {(int(root.get("root")), offset): 1}
            else:
                at = offset + (rank * share if kind == "reduce_scatter" else 0)
                wanted = {(other, at): 1 for other in range(world)}
            if memory.get(cell(rank, "o", offset)) != Counter(wanted):
                raise Broken(f"o[{offset}] of {rank}")


def is_right(text, rng, tries=8):
    """Whether a program computes its collective in every order of its thread blocks that was tried."""
    orders = [min, max, *([rng.choice] * (tries - 2))]
    try:
        for choose in orders:
            run(text, choose)
    except Broken:
        return False
    return True
