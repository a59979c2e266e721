"""Random numbers inside what is cut: other ones on every rank, while the ranks' common generator stays common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...batches import mix
from ...mesh import World


@contextmanager
def own_numbers(world: World, device: torch.device) -> Iterator[None]:
    """In the block torch's default generator for `device` gives numbers that are this rank's alone.

    Their seed is drawn from the common generator of the CPU, once on every rank, so that ranks stay in step, and so
    that activation checkpointing, which replays that generator, replays these numbers too.
    """
    seed = mix(int(torch.randint(0, 2**62, (), device="cpu")), world.rank) >> 1
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def align(world: World, device: torch.device) -> None:
    """Gives all ranks rank 0's state of the default generators, so that dropout on full tensors drops alike."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    states = world.from_root(states)
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
