"""The trained parameters of a model as few flat tensors, so that they are sent, added and averaged in one piece."""

from collections.abc import Callable, Iterable, Sequence

import torch

from ...batches import views_like

_ALIGNMENT = 64


class FlatParameters:
    """Moves the data of parameters into one flat tensor for each element type; the parameters keep their identity."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],  # parameters of a model that are trained; each counts once
        # a function that gives a uint8 tensor of so many bytes for them to lie in; None for private memory. Where it is
        # shared, the parameters are what lies there once `fill` or another process has written it.
        memory: Callable[[int], torch.Tensor] | None = None,
        *,
        fill: bool = True,
    ) -> None:
        kinds: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        self.parameters = list(dict.fromkeys(parameters))  # in order, each once
        for parameter in self.parameters:
            kinds.setdefault(parameter.dtype, []).append(parameter)
        self._kinds = kinds
        self._sizes = [(dtype, sum(p.numel() for p in members)) for dtype, members in kinds.items()]
        # bytes of all of them together, each type's part at a multiple of 64
        self.nbytes = sum(_padded_nbytes(dtype, count) for dtype, count in self._sizes)
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        buffer = (
            torch.empty(self.nbytes, dtype=torch.uint8, device=self.device) if memory is None else memory(self.nbytes)
        )
        self.flats = self.views(buffer)  # flat tensors that the parameters lie in, by element type
        for flat, members in zip(self.flats, kinds.values(), strict=True):
            for parameter, place in zip(members, views_like(flat, members), strict=True):
                if fill:
                    place.copy_(parameter.detach())
                parameter.data = place

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """`buffer`, a uint8 tensor of `nbytes`, as one tensor for each element type."""
        found, begin = [], 0
        for dtype, count in self._sizes:
            found.append(buffer[begin : begin + count * dtype.itemsize].view(dtype))
            begin += _padded_nbytes(dtype, count)
        return found

    def like(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Copy `tensors`, one for each parameter in order, as flat tensors; zeros for None."""
        by_parameter = dict(zip(self.parameters, tensors, strict=True))
        found = []
        for flat, members in zip(self.flats, self._kinds.values(), strict=True):
            parts = []
            for parameter in members:
                value = by_parameter[parameter]
                parts.append(
                    (torch.zeros_like(parameter) if value is None else value).detach().reshape(-1).to(flat.dtype)
                )
            found.append(torch.cat(parts))
        return found

    def spread(self, flats: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy flat tensors back to the `tensors` that are there: the other way."""
        by_parameter = dict(zip(self.parameters, tensors, strict=True))
        for flat, members in zip(flats, self._kinds.values(), strict=True):
            for parameter, part in zip(members, views_like(flat, members), strict=True):
                value = by_parameter[parameter]
                if value is not None:
                    value.copy_(part)

    def check(self) -> None:
        """Raise RuntimeError if somebody has given a parameter other memory since (`model.to`, say)."""
        for flat, members in zip(self.flats, self._kinds.values(), strict=True):
            begin, end = flat.data_ptr(), flat.data_ptr() + flat.numel() * flat.element_size()
            for parameter in members:
                if parameter.numel() and not begin <= parameter.data_ptr() < end:
                    raise RuntimeError(
                        "a parameter was moved to other memory after hocket had taken the model over: move and convert "
                        "the model (model.to, model.half) before that"
                    )


def _padded_nbytes(dtype: torch.dtype, count: int) -> int:
    return -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
