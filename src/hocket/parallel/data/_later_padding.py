"""Looks at padding that comes after a loop's first batch: whether a model or its loss goes by how far it reaches."""

from collections.abc import Sequence
from typing import Any

import torch

from hocket.comm import torch_adapter

from ..batches import Alone, Packed, divisors, tensors_in
from ..mesh import World
from ._apart import PADDED, padded_apart
from ._packed_apart import MEET, packed_apart

FOUND = 2.0**40
"""Says, in a sum over ranks of smaller numbers, that padding changes the loss of one."""

LATENT = 2.0**20
"""Says that it would, where ranks pad to different lengths; this rank has samples of one length."""

_LOOKS = 4
_ALL, _ROWS = 2, 3
"""In losses of how many lengths a mean over all that is padded, or over as many, must be seen to be no chance."""


class LaterPadding:
    """Looks on until some batches that a rank has padded were seen, and tells all ranks in the sum before a backward.

    Args:
        module: The model.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module, self._looks = module, _LOOKS
        self._found: dict[int, str] = {}  # by places among the outputs, how padding changes them
        self._marks: list[set[int]] = []  # places in the graph of these outputs
        self._length = 0  # to which the loop has padded; 0 if the loader has
        self._sizes: list[tuple[int, int, int]] = []  # of padded outputs: a length, numbers, and rows of them
        self._means: list[set[int]] = [set(), set()]  # lengths of which a loss has divided by such numbers
        self._others = False  # whether one has not
        self._said, self._latent = "", False
        self._meet = ""  # how samples of a row meet in the model
        self._shapes: list[torch.Size] = []  # of samples, as the model is given them

    @property
    def looks(self) -> bool:
        """Whether another batch is to be looked at."""
        return self._looks > 0 and not self._said

    def look(self, inputs: Any, alone: Alone | None, samples: int, *, model: bool) -> None:
        """Look at the batch of a forward pass that is the first with it.

        Args:
            inputs: What the model is called with: positional arguments, and those by name.
            alone: Some of its samples, if others pad them to another length.
            samples: How many the pass has.
            model: Whether the model itself is to be looked at, and not only what the loop computes from its outputs.
        """
        self._found, self._sizes = {}, []
        if alone is None:
            return
        given = ((a.shape[1:], b.shape[1:]) for a, b in zip(*map(tensors_in, (inputs, alone.batch)), strict=False))
        self._latent = any(n > m for pair in given if len({*map(len, pair)}) == 1 for m, n in zip(*pair, strict=True))
        self._looks -= 1
        mine, theirs, found = padded_apart(self._module, inputs, alone, samples)
        self._found, self._length = found if model else {}, alone.length
        for a, b in zip(mine, theirs, strict=False):
            dims = [i for i, n in enumerate(a.shape) if i and a.dim() == b.dim() and n != b.shape[i]]
            if dims and all(a.shape[i] > b.shape[i] for i in dims):
                self._sizes.append((a.shape[dims[0]], samples * a.shape[1:].numel(), samples * a.shape[dims[0]]))

    def look_packed(self, inputs: Any, other: Any, packed: Packed) -> None:
        """Look at a batch whose samples are packed into one row, and at what its last one is by itself, in `other`."""
        self._meet = self._meet or packed_apart(self._module, inputs, other, packed)

    def note(self, outputs: Sequence[torch.Tensor]) -> None:
        """Take notice of what that pass has given."""
        self._marks = [torch_adapter.graph_marks([outputs[i]]) for i in self._found if i < len(outputs)]

    def number(self, loss: torch.Tensor, samples: int) -> float:
        """Return what this rank adds to a sum over ranks: `FOUND` or `LATENT` where padding changes its loss."""
        if self._meet:
            return FOUND
        if not self._said and any(torch_adapter.reaches(loss, one) for one in self._marks if one):
            self._said = next(iter(self._found.values()))
        if self._sizes and loss.numel() == 1:
            counts = {int(one) for one in divisors(loss, samples, once=True)}
            for length, *sizes in self._sizes:
                for lengths, size in zip(self._means, sizes, strict=True):
                    lengths |= {length} if size in counts else set()
            self._others |= not any(counts & {*sizes} for _, *sizes in self._sizes)
            if len(self._means[0]) >= _ALL or (len(self._means[1]) >= _ROWS and not self._others):
                self._said = f"the loss is a mean over {max(counts)} numbers, of padding, too"
        self._found, self._marks, self._sizes = {}, [], []
        return (LATENT if self._latent else FOUND) if self._said else 0.0

    def given(self, inputs: Any) -> None:
        """Take notice of what a forward pass is given."""
        self._shapes = [one.shape[1:] for one in tensors_in(inputs) if not one.is_nested]

    def lengths(self, samples: int) -> list[float]:
        """Return what tells, in sums over ranks, whether all that have samples have padded ones to the same length."""
        length = self._shape_number * (samples > 0)
        return [float(samples > 0), length, length * length]

    def check(self, number: float, lengths: Sequence[float], world: World) -> None:
        """Refuse by sums over ranks of `number` and `lengths`; a collective operation where it does. See `refuse`."""
        ranks, length, squared = lengths
        if number >= FOUND or (number >= LATENT and ranks * squared != length * length):
            self.refuse(world)

    @property
    def _shape_number(self) -> float:
        """A number that tells the lengths of padded samples from others."""
        return float(sum(n * (1 + place) for place, shape in enumerate(self._shapes) for n in shape))

    def refuse(self, world: World) -> None:
        """Refuse what was found on some rank; a collective operation.

        Raises:
            RuntimeError: a rank has padded its samples to another length than others, and this changes the loss; or
                samples that it has packed into one row meet in the model.
        """
        everyone = world.from_all((self._said, self._length, self._latent, self._shapes))
        if meet := next(filter(None, world.from_all(self._meet)), ""):
            raise RuntimeError(MEET.format(meet))
        lengths = {length for _, length, *_ in everyone} - {0}  # alike where a loop pads to one length
        shapes = [one for *_, one in everyone]
        for said, length, latent, _ in everyone:
            if said and (not length or len(lengths) > 1) and not (latent and all(one == shapes[0] for one in shapes)):
                raise RuntimeError(PADDED.format(said))
        self._said = self._said if self._latent else ""
