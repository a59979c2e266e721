import pytest
import torch
import torch.nn.functional as F

from hocket.workloads.edsr.model import EDSR, start_as_magnifier
from hocket.workloads.edsr.settings import Size


def trainable(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    ("size", "scale", "count"),
    [
        ("full", 2, 40_729_603),
        ("full", 3, 43_680_003),
        ("full", 4, 43_089_923),
        ("baseline", 2, 1_369_859),
        ("baseline", 3, 1_554_499),
        ("baseline", 4, 1_517_571),
    ],
)
def test_parameter_counts_are_the_published_ones(size: str, scale: int, count: int) -> None:
    with torch.device("meta"):
        assert trainable(EDSR(size, scale)) == count


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_output_is_larger_by_the_scale(scale: int) -> None:
    assert EDSR("demo", scale)(torch.rand(2, 3, 7, 5)).shape == (2, 3, 7 * scale, 5 * scale)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_start_is_nearest_neighbour_magnification(scale: int) -> None:
    torch.manual_seed(0)
    model = EDSR(Size(blocks=2, features=8, residual_scale=0.1), scale)
    start_as_magnifier(model)
    image = torch.rand(1, 3, 6, 9)
    torch.testing.assert_close(model(image), F.interpolate(image, scale_factor=scale, mode="nearest"))


def test_from_the_start_every_stage_of_the_network_can_learn() -> None:
    """Zeros must not block the gradient: after a few steps every parameter has moved."""
    torch.manual_seed(0)
    model = EDSR(Size(blocks=2, features=8, residual_scale=1.0), 2)
    start_as_magnifier(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    low, high = torch.rand(2, 3, 8, 8), torch.rand(2, 3, 16, 16)
    for _ in range(4):
        optimizer.zero_grad()
        F.l1_loss(model(low), high).backward()
        optimizer.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_residual_scale_scales_the_branch() -> None:
    torch.manual_seed(0)
    whole = EDSR(Size(blocks=1, features=8, residual_scale=1.0), 2).body[0]
    tenth = EDSR(Size(blocks=1, features=8, residual_scale=0.1), 2).body[0]
    tenth.load_state_dict(whole.state_dict())
    x = torch.rand(1, 8, 5, 5)
    torch.testing.assert_close(tenth(x) - x, 0.1 * (whole(x) - x))


def test_colours_are_centred_on_the_mean_of_the_training_set() -> None:
    """A network whose weights are all zero gives back the mean colour, which is no parameter."""
    model = EDSR("demo", 2)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    colours = model(torch.rand(1, 3, 4, 4))[0, :, 0, 0]
    torch.testing.assert_close(colours, torch.tensor([0.4488, 0.4371, 0.4040]))
    assert not any("mean" in name for name in model.state_dict())


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="scale 5 is not one of 2, 3, 4"):
        EDSR("demo", 5)
    with pytest.raises(ValueError, match="size 'huge' is not one of full, baseline, demo"):
        EDSR("huge", 2)
