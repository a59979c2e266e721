"""Random numbers inside what is cut: other ones on every rank, while the ranks' common generator stays common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...batches import RngStates, mix
from ...mesh import World


@contextmanager
def own_numbers(world: World, device: torch.device) -> Iterator[None]:
    """Open a block in which torch's default generator for `device` gives numbers that are this rank's alone.

    Their seed is drawn from the common generator of the CPU, once on every rank, so that ranks stay in step, and so
    that activation checkpointing, which replays that generator, replays these numbers too.
    """
    with _disable_current_modes():  # who notes what a model draws is told of what it draws with this seed
        seed = mix(int(torch.randint(0, 2**62, (), device="cpu")), world.rank) >> 1
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def align(world: World, device: torch.device) -> None:
    """Give all ranks rank 0's states of the default generators: dropout drops alike, and code decides alike."""
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    states, on_gpu = world.from_root((RngStates.now(), on_gpu))
    states.install()
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu, device)
