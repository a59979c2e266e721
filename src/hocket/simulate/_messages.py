"""The messages of a pipeline's order under way: those that share links share them evenly, as flows do.

It is what `_loop.py` does with flows, max-min fair, for the few messages of one pipeline: fast enough for each of the
plans of a search.
"""

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence

Path = Sequence[tuple[Hashable, float]]  # links, and the seconds in which a message that has each alone passes it

_SAME = 1 + 1e-9  # links that differ by rounding only are one bottleneck


class _Message:
    __slots__ = ("channel", "left", "path", "rate", "since_s", "stamp", "weight")

    def __init__(self, path: Path, channel: Hashable, nbytes: float) -> None:
        self.path, self.channel = path, channel
        self.weight = 1 / (nbytes or path[0][1])  # a larger message passes more slowly at the same rate
        self.left, self.rate, self.since_s, self.stamp = 1.0, 0.0, 0.0, 0


class MessagesUnderWay:
    """What is on its way between the ranks of a pipeline.

    Messages between the same two ranks follow each other. Those that share a link each get an even part of it, and
    what others leave that are held back elsewhere.
    """

    def __init__(self) -> None:
        self.next_s = math.inf  # when something happens next; infinite if nothing is on its way
        self._coming: list[tuple[float, int, int]] = []  # time, number and stamp of a message that is ready, or there
        self._messages: dict[int, _Message] = {}
        self._on: dict[Hashable, list[int]] = {}  # messages on every link
        self._channels: dict[Hashable, deque[int]] = {}  # messages that move or wait, by what they wait for

    def send(self, number: int, now: float, latency: float, path: Path, channel: Hashable, nbytes: float = 0.0) -> None:
        """Let a message go.

        `latency` is what it takes besides, before it is on any link of its `path`. Messages of one `channel` follow
        each other. A link is shared evenly by `nbytes`; without them, all links count as equally fast.
        """
        self._messages[number] = _Message(path, channel, nbytes)
        heapq.heappush(self._coming, (now + latency, number, 0))
        self.next_s = self._coming[0][0]

    def advance(self) -> int | None:
        """Let happen what happens next; return the number of a message that is there, if one is."""
        now, number, stamp = heapq.heappop(self._coming)
        found = None
        if stamp:
            found = number
            self._finish(number, now)
        else:
            queue = self._channels.setdefault(self._messages[number].channel, deque())
            queue.append(number)
            if len(queue) == 1:
                self._start(number, now)
        coming, messages = self._coming, self._messages
        while coming and (coming[0][1] not in messages or messages[coming[0][1]].stamp != coming[0][2]):
            heapq.heappop(coming)  # its rate has changed since
        self.next_s = coming[0][0] if coming else math.inf
        return found

    def _start(self, number: int, now: float) -> None:
        message, alone = self._messages[number], True
        message.since_s = now
        for link, _ in message.path:
            there = self._on.setdefault(link, [])
            alone = alone and not there
            there.append(number)
        if alone:
            self._move(number, 1 / max(seconds for _, seconds in message.path), now)
        else:
            self._share(message.path, now)

    def _finish(self, number: int, now: float) -> None:
        message = self._messages.pop(number)
        for link, _ in message.path:
            self._on[link].remove(number)
        if any(self._on[link] for link, _ in message.path):
            self._share(message.path, now)
        queue = self._channels[message.channel]
        queue.popleft()
        if queue:
            self._start(queue[0], now)

    def _move(self, number: int, rate: float, now: float) -> None:
        message = self._messages[number]
        message.left = max(0.0, message.left - message.rate * (now - message.since_s))
        message.rate, message.since_s, message.stamp = rate, now, message.stamp + 1
        heapq.heappush(self._coming, (now + message.left / rate, number, message.stamp))

    def _share(self, path: Path, now: float) -> None:
        """Give all that share links with a path, directly or over others, their rates: progressive filling."""
        links, live = self._together(link for link, _ in path)
        left = dict.fromkeys(links, 1.0)
        while live:
            demand = dict.fromkeys(left, 0.0)
            for number in live:
                message = self._messages[number]
                for link, seconds in message.path:
                    demand[link] += seconds * message.weight
            level = {link: left[link] / wanted for link, wanted in demand.items() if wanted}
            least = min(level.values()) * _SAME
            slower = []
            for number in live:
                message = self._messages[number]
                if all(level[link] > least for link, _ in message.path):
                    slower.append(number)
                    continue
                rate = least / _SAME * message.weight
                for link, seconds in message.path:
                    left[link] = max(0.0, left[link] - seconds * rate)
                if abs(rate - message.rate) > (_SAME - 1) * rate:
                    self._move(number, rate, now)
            live = slower

    def _together(self, links: Iterable[Hashable]) -> tuple[list[Hashable], list[int]]:
        """Return links and those that messages on them pass, too, and so on; and these messages, in order."""
        todo = list(links)
        found, seen = set(), dict.fromkeys(todo)
        while todo:
            for number in self._on.get(todo.pop(), ()):
                if number not in found:
                    found.add(number)
                    new = [link for link, _ in self._messages[number].path if link not in seen]
                    seen.update(dict.fromkeys(new))
                    todo += new
        return list(seen), sorted(found)
