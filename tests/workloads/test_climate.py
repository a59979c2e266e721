import math

import numpy as np
import pytest
import torch

from hocket.workloads import build, settings_from_options
from hocket.workloads.climate.data import CHANNELS, CLASSES, SHARES, Maps
from hocket.workloads.climate.model import UNet
from hocket.workloads.climate.workload import confusion, intersection_over_union


def test_a_map_is_a_function_of_seed_epoch_and_index() -> None:
    maps = Maps(16, 24, seed=2)
    fields, labels = maps[5]
    assert fields.shape == (len(CHANNELS), 16, 24)
    assert labels.shape == (16, 24)
    again = Maps(16, 24, seed=2)[5]
    assert torch.equal(fields, again[0])
    assert torch.equal(labels, again[1])
    maps.set_epoch(1)
    assert not torch.equal(fields, maps[5][0])
    with pytest.raises(IndexError):
        maps[10**6]


def test_classes_are_as_rare_as_their_weights_take_them_to_be() -> None:
    maps = Maps(64, 96, seed=4)
    labels = torch.stack([maps[i][1] for i in range(120)])
    for number, share in enumerate(SHARES):
        assert float((labels == number).double().mean()) == pytest.approx(share, rel=0.3)


def test_cyclones_are_deep_and_whirl_and_rivers_are_moist() -> None:
    maps = Maps(64, 96, seed=6)
    fields, labels = (torch.stack(part) for part in zip(*[maps[i] for i in range(40)], strict=True))
    named = {name: fields[:, i] for i, name in enumerate(CHANNELS)}
    cyclone, river, other = (labels == number for number in (1, 2, 0))
    assert float(named["PSL"][cyclone].mean()) < float(named["PSL"][other].mean()) - 1.0
    assert float(named["TMQ"][river].mean()) > float(named["TMQ"][other].mean()) + 0.8
    east, north = named["U850"], named["V850"]
    turning = (north.roll(-1, 2) - north.roll(1, 2)) - (east.roll(-1, 1) - east.roll(1, 1))
    assert float(turning[:, 40:][cyclone[:, 40:]].mean()) * float(turning[:, :24][cyclone[:, :24]].mean()) < 0.0


def test_intersection_over_union_is_as_defined() -> None:
    truth, told = np.array([[0, 0, 1], [1, 2, 2]]), np.array([[0, 1, 1], [1, 0, 2]])
    table = confusion(truth, told, 4)
    assert table.sum() == 6
    found = intersection_over_union(table)
    assert found[:3] == pytest.approx([1 / 3, 2 / 3, 1 / 2])
    assert math.isnan(found[3])


def test_a_score_for_each_class_and_pixel() -> None:
    with torch.device("meta"):
        assert UNet(size="demo")(torch.empty(2, 16, 64, 96)).shape == (2, len(CLASSES), 64, 96)


def test_the_loss_weighs_rare_classes_more() -> None:
    workload = build(settings_from_options("climate", {"workers": 1, "size": "tiny"}))
    wrong = torch.zeros(1, 3, 1, 1)
    losses = [float(workload.loss_fn(wrong, torch.full((1, 1, 1), number))) for number in range(3)]
    assert losses == pytest.approx([math.log(3) / math.sqrt(share) for share in SHARES], rel=1e-5)
