import hashlib

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hocket.workloads.edsr import photographs
from hocket.workloads.edsr.data import HeldOut, Patches, to_pixels, to_tensor, turn
from hocket.workloads.edsr.photographs import Photograph, resize_bicubic


@pytest.fixture(scope="module")
def training() -> list[Photograph]:
    return [Photograph.load(name, 2) for name in ("china.jpg", "rocket.jpg", "motorcycle_left.png")]


def test_all_photographs_are_installed_in_colour() -> None:
    for name in photographs.TRAINING + photographs.HELD_OUT:
        photograph = Photograph.load(name, 3)
        assert photograph.high.ndim == 3
        assert photograph.high.shape[2] == 3
        assert photograph.high.shape == tuple(np.array(photograph.low.shape) * (3, 3, 1))


def test_no_held_out_photograph_is_trained_on() -> None:
    assert not set(photographs.TRAINING) & set(photographs.HELD_OUT)
    digests = [
        hashlib.sha256(Photograph.load(name, 2).high.tobytes()).digest()
        for name in photographs.TRAINING + photographs.HELD_OUT
    ]
    assert len(set(digests)) == len(digests)


def test_a_missing_photograph_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="photograph nobody.png: not in the installed scikit-image"):
        photographs.path_of("nobody.png")


def test_a_patch_depends_on_seed_epoch_and_index_alone(training: list[Photograph]) -> None:
    def patches(seed: int, epoch: int) -> Patches:
        found = Patches(training, 32, seed=seed, length=12)
        found.set_epoch(epoch)
        return found

    first, again = patches(3, 5), patches(3, 5)
    forwards = [first[index][1] for index in range(12)]
    backwards = [again[index][1] for index in reversed(range(12))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert not torch.equal(first[0][1], first[1][1])
    assert not torch.equal(first[0][1], patches(4, 5)[0][1])
    assert not torch.equal(first[0][1], patches(3, 6)[0][1])


def test_patches_do_not_depend_on_loader_processes(training: list[Photograph]) -> None:
    patches = Patches(training, 16, seed=1, length=10)
    patches.set_epoch(2)
    alone = [high for _, high in DataLoader(patches, batch_size=4)]
    helped = [high for _, high in DataLoader(patches, batch_size=4, num_workers=2)]
    assert [len(batch) for batch in alone] == [4, 4, 2]
    assert all(torch.equal(a, b) for a, b in zip(alone, helped, strict=True))


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_low_and_high_show_the_same_place(scale: int) -> None:
    """Shrinking the high patch gives the low patch, apart from the border, where the kernel saw beyond the patch."""
    patches = Patches([Photograph.load("china.jpg", scale)], 16 * scale, length=20)
    for low, high in patches:
        shrunk = resize_bicubic(to_pixels(high), 16, 16)
        inside = slice(3, -3)
        difference = np.abs(shrunk[inside, inside].astype(int) - to_pixels(low)[inside, inside].astype(int))
        assert difference.max() <= 1


@pytest.mark.parametrize("symmetry", range(8))
def test_shrinking_commutes_with_turning(training: list[Photograph], symmetry: int) -> None:
    """So a turned pair is a pair that a turned photograph would have given. One level of rounding is allowed."""
    high = np.ascontiguousarray(training[0].high[:120, :160])
    low = resize_bicubic(high, 80, 60)
    turned = np.ascontiguousarray(turn(high, symmetry))
    shrunk = resize_bicubic(turned, turned.shape[1] // 2, turned.shape[0] // 2)
    assert np.abs(shrunk.astype(int) - turn(low, symmetry).astype(int)).max() <= 1


def test_the_eight_symmetries_are_different() -> None:
    corner = np.zeros((3, 3, 3), np.uint8)
    corner[0, 1] = 1
    corner[0, 0] = 2
    assert len({turn(corner, symmetry).tobytes() for symmetry in range(8)}) == 8


def test_every_symmetry_and_photograph_is_drawn(training: list[Photograph]) -> None:
    flat = [
        Photograph(str(level), np.full((20, 20, 3), level, np.uint8), np.full((10, 10, 3), level, np.uint8), 2)
        for level in range(4)
    ]
    drawn = {int(to_pixels(high)[0, 0, 0]) for _, high in Patches(flat, 4, length=64)}
    assert drawn == {0, 1, 2, 3}


def test_bytes_survive_the_way_to_a_tensor_and_back() -> None:
    pixels = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    assert np.array_equal(to_pixels(to_tensor(pixels)), pixels)


def test_bicubic_is_made_from_the_low_resolution_alone() -> None:
    photograph = Photograph.load("coffee.png", 2)
    blind = Photograph("blind", np.zeros_like(photograph.high), photograph.low, 2)
    assert np.array_equal(photograph.bicubic(), blind.bicubic())
    index, low, bicubic, high = HeldOut([photograph])[0]
    assert (index, low.shape, bicubic.shape) == (0, (3, 200, 300), high.shape)


def test_impossible_patches_are_refused(training: list[Photograph]) -> None:
    with pytest.raises(ValueError, match="patch 600 is larger than china"):
        Patches(training, 600)
    with pytest.raises(ValueError, match="patch 33 is not a multiple of the scale 2"):
        Patches(training, 33)
    with pytest.raises(ValueError, match="no photographs"):
        Patches([], 32)
    with pytest.raises(IndexError):
        Patches(training, 32, length=3)[3]
