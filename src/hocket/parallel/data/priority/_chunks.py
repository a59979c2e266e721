"""Gradients cut into chunks, and the order in which chunks are sent: functions of numbers, the same on every rank."""

import heapq
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Stretch(NamedTuple):
    """Elements of one gradient."""

    number: int  # number of the parameter
    begin: int  # first element
    end: int  # one past the last element


class Chunk(NamedTuple):
    """What one operation reduces."""

    # stretches of gradients, in the order in which the forward pass needs the parameters
    stretches: tuple[Stretch, ...]
    nbytes: int  # bytes of all of them


def cut(
    numbers: Sequence[int], numels: Sequence[int], itemsizes: Sequence[int], kinds: Sequence[Hashable], most_nbytes: int
) -> list[Chunk]:
    """Cut gradients into chunks of `most_nbytes` at most, large ones into several, small ones together.

    Args:
        numbers: Parameters in the order in which the forward pass needs them.
        numels: Elements of each parameter, by number.
        itemsizes: Bytes of an element, by number.
        kinds: What must not be mixed in a chunk, by number.
        most_nbytes: Most bytes of a chunk; one element at least.
    """
    found: list[Chunk] = []
    stretches: list[Stretch] = []
    nbytes, kind = 0, None

    def close() -> None:
        nonlocal nbytes
        if stretches:
            found.append(Chunk(tuple(stretches), nbytes))
            stretches.clear()
            nbytes = 0

    for number in numbers:
        if kinds[number] != kind:
            close()
            kind = kinds[number]
        size, at = itemsizes[number], 0
        while at < numels[number]:
            fits = max(most_nbytes - nbytes, 0) // size
            if not fits and stretches:
                close()
                continue
            end = min(numels[number], at + max(1, fits))
            stretches.append(Stretch(number, at, end))
            nbytes += (end - at) * size
            at = end
    close()
    return found


def order(ready_s: Sequence[float], nbytes: Sequence[int], rate_Bps: float, credit_nbytes: int) -> list[int]:
    """Return the order in which a queue by priority sends chunks, the first chunk being the most urgent.

    A chunk is handed over as soon as it is ready and what is on its way leaves credit for it; of those that
    are ready the most urgent goes first. What is on its way goes one after the other at a constant rate. All ranks must
    post the same operations in the same order, so the queue runs here, on one rank's times of an earlier step, and not
    when the chunks are sent (ByteScheduler's scheduler, Peng et al. 2019, with its decisions made ahead).

    Args:
        ready_s: When each chunk's gradients are complete.
        nbytes: Bytes of each chunk.
        rate_Bps: Rate at which chunks are reduced.
        credit_nbytes: Most bytes on the way at once; a chunk goes alone where it has more.

    Returns:
        Numbers of chunks.
    """
    waiting = sorted(range(len(nbytes)), key=lambda chunk: (ready_s[chunk], chunk))
    urgent: list[int] = []
    flying: list[tuple[float, int]] = []  # when each arrives, and its bytes
    found: list[int] = []
    now_s = free_s = 0.0
    while len(found) < len(nbytes):
        while waiting and ready_s[waiting[0]] <= now_s:
            heapq.heappush(urgent, waiting.pop(0))
        flying = [entry for entry in flying if entry[0] > now_s]
        credit_left = credit_nbytes - sum(size for _, size in flying)
        if urgent and (not flying or nbytes[urgent[0]] <= credit_left):
            chunk = heapq.heappop(urgent)
            free_s = max(free_s, now_s) + nbytes[chunk] / rate_Bps
            flying.append((free_s, nbytes[chunk]))
            found.append(chunk)
            continue
        events = [arrives_s for arrives_s, _ in flying] if urgent else []
        if waiting:
            events.append(ready_s[waiting[0]])
        now_s = min(events)
    return found
