"""The text, and excerpts of it.

The text is what Python's own ``help()`` says about its topics: the language reference, some 300 kB of English and
Python, which comes with the interpreter (another release has another edition of it).
"""

import importlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hocket.workloads._drawn import Drawn
from hocket.workloads.language_model.settings import EXCERPTS_PER_EPOCH

Text = npt.NDArray[np.uint8]

_SECTION = 20  # paragraphs
_HELD_OUT_EVERY = 10  # sections


@dataclass(frozen=True, slots=True)
class Texts:
    """Bytes to learn from, and bytes of other paragraphs to judge by."""

    training: Text
    held_out: Text


def load() -> Texts:
    """Return the topics in the order of their names; of every 200 paragraphs 20 are held out.

    Topics repeat each other: a paragraph counts where it first occurs, so that none is both learnt and judged by.

    Raises:
        FileNotFoundError: This Python came without them.
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError as error:
        raise FileNotFoundError(
            "the text of language_model is pydoc_data.topics of Python's standard library, and this Python lacks it; "
            "install the whole standard library, or use another Python"
        ) from error
    paragraphs = dict.fromkeys(
        paragraph.strip("\n") for name in sorted(topics) for paragraph in topics[name].split("\n\n")
    )
    parts: tuple[list[str], list[str]] = ([], [])
    for number, paragraph in enumerate(paragraphs):
        parts[number // _SECTION % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1].append(paragraph)
    training, held_out = (np.frombuffer("\n\n".join(part).encode(), dtype=np.uint8) for part in parts)
    return Texts(training, held_out)


class Excerpts(Drawn[tuple[Tensor, Tensor]]):
    """Excerpts from random places: item ``index`` is (bytes, the byte after each of them), int64, (context,) each.

    An excerpt is a function of (seed, epoch, index) alone, so that it does not matter which worker draws it. Raises
    ValueError: the text is not longer than an excerpt.
    """

    def __init__(self, text: Text, context: int, *, seed: int = 0, length: int = EXCERPTS_PER_EPOCH) -> None:
        if len(text) <= context:
            raise ValueError(f"Excerpts: a text of {len(text)} bytes has no excerpt of {context} and a byte after it")
        super().__init__(seed=seed, length=length)
        self._text, self._context = text, context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = self.random(index)
        return _cut(self._text, int(random.integers(len(self._text) - self._context)), self._context)


class Pages(Dataset[tuple[Tensor, Tensor]]):
    """A text from its beginning in excerpts that do not overlap, as `Excerpts` gives them; a short rest is left out."""

    def __init__(self, text: Text, context: int) -> None:
        self._text, self._context = text, context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"Pages: index {index} is not in 0..{len(self) - 1}")
        return _cut(self._text, index * self._context, self._context)


def _cut(text: Text, start: int, context: int) -> tuple[Tensor, Tensor]:
    excerpt = torch.from_numpy(text[start : start + context + 1].astype(np.int64))
    return excerpt[:-1], excerpt[1:]
