"""Parameters that a forward pass writes to while torch's FSDP2 has them gathered: the write goes with the gathered."""

from typing import Any

import torch

_COMPARED = 2  # passes: a mask that holds at first may not after the first step
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # by bytes of an element


class LostWrites:
    """Finds writes to gathered parameters, those that go past torch's count of versions (`p.data *= mask`) too.

    The latter are found by a hash of each gathered parameter, from when it is gathered to when it is let go of, in the
    first two passes.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Any, str]] = []  # FSDP2's parameters, with the model's names
        self._hashes: dict[str, torch.Tensor] = {}  # of what is gathered now
        self._pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # hashes before and after
        self._passes = 0

    def follow(self, held: Any, name: str) -> None:
        """Look at what FSDP2 makes of one of its parameters."""
        self._held.append((held, name))
        take, let_go = held.to_unsharded, held.to_sharded

        def to_unsharded() -> None:
            take()
            if (
                self._passes < _COMPARED and type(held._unsharded_param) is torch.nn.Parameter
            ):  # no tensor of another kind
                self._hashes[name] = _hash(held._unsharded_param)

        def to_sharded() -> None:
            before = self._hashes.pop(name, None)
            if before is not None:
                self._pairs.setdefault(name, []).append((before, _hash(held._unsharded_param)))
            let_go()

        held.to_unsharded, held.to_sharded = to_unsharded, to_sharded

    def refuse(self) -> None:
        """Raise a RuntimeError that names a parameter which a pass has written to; a pass is over."""
        if self._passes <= _COMPARED:
            self._passes += 1
        pairs, self._pairs = self._pairs, {}
        for held, name in self._held:
            whole = getattr(held, "_unsharded_param", None)
            counted = whole is not None and whole._version
            if counted or any(not torch.equal(before, after) for before, after in pairs.get(name, ())):
                raise RuntimeError(
                    f"the model's forward writes to parameter {name!r}, which is lost when shard = 'parameters' lets "
                    "go of it: write to it between steps, or say shard = 'gradients'"
                )


def _hash(parameter: torch.Tensor) -> torch.Tensor:
    return torch.hash_tensor(parameter.detach().view(_BITS[parameter.element_size()]))
