import torch

from hocket.workloads.resnet50.data import SyntheticImages
from hocket.workloads.resnet50.model import Bottleneck, ResNet50


def test_parameter_count_is_the_published_one() -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in ResNet50().parameters()) == 25_557_032


def test_an_image_becomes_scores() -> None:
    assert ResNet50(classes=10)(torch.rand(2, 3, 64, 64)).shape == (2, 10)


def test_the_stride_sits_in_the_three_by_three_convolution() -> None:
    """This is version 1.5; in version 1 it sat in the first convolution."""
    with torch.device("meta"):
        blocks = [block for block in ResNet50().blocks if isinstance(block, Bottleneck)]
    assert len(blocks) == 16
    assert [block.middle[0].stride[0] for block in blocks] == [1] * 3 + [2] + [1] * 3 + [2] + [1] * 5 + [2] + [1] * 2
    assert all(block.reduce[0].stride == (1, 1) for block in blocks)


def test_synthetic_images_are_the_same_for_the_same_seed() -> None:
    first, again = SyntheticImages(100, 32, seed=4), SyntheticImages(100, 32, seed=4)
    assert len(first) == 100
    assert torch.equal(first[77][0], again[77][0])
    assert torch.equal(first[77][1], again[77][1])
    assert not torch.equal(first[0][0], SyntheticImages(100, 32, seed=5)[0][0])
    assert first[0][0].shape == (3, 32, 32)
