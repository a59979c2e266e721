import math

import numpy as np
import pytest
import torch

from hocket.workloads.resnet50.model import Bottleneck
from hocket.workloads.resnet101.data import Compositions, load
from hocket.workloads.resnet101.model import ResNet101
from hocket.workloads.resnet101.workload import average_precision


def test_parameter_count_is_the_published_one() -> None:
    with torch.device("meta"):
        model = ResNet101()
    assert sum(parameter.numel() for parameter in model.parameters()) == 44_549_160
    assert sum(isinstance(block, Bottleneck) for block in model.blocks) == 33


def test_labels_say_which_digits_occur() -> None:
    training, held_out = load()
    assert len(training.images) + len(held_out.images) == 1797
    images = Compositions(training, 48, seed=1)
    counts = [int(images[index][1].sum()) for index in range(60)]
    assert set(counts) == {1, 2, 3}
    image, labels = images[4]
    assert image.shape == (3, 48, 48)
    assert labels.shape == (10,)
    assert torch.equal(image, Compositions(training, 48, seed=1)[4][0])
    images.set_epoch(1)
    assert not torch.equal(image, images[4][0])


@pytest.mark.parametrize("side", [32, 33, 50, 224])
def test_digits_fit_images_of_any_size(side: int) -> None:
    images = Compositions(load()[0], side)
    assert all(images[index][0].shape == (3, side, side) for index in range(20))


def test_average_precision_is_that_of_scikit_learn() -> None:
    from sklearn.metrics import average_precision_score

    random = np.random.default_rng(0)
    for _ in range(20):
        scores, occurs = random.integers(6, size=40).astype(np.float64), random.uniform(size=40) < 0.3
        assert average_precision(scores, occurs) == pytest.approx(average_precision_score(occurs, scores))
    assert math.isnan(average_precision(np.zeros(3), np.zeros(3, dtype=bool)))
