import numpy as np
import pytest
import torch

from hocket.workloads.cosmoflow.data import MIDDLE, SPREAD, Universes, amplitude, power
from hocket.workloads.cosmoflow.model import CosmoFlow


def test_a_volume_is_a_function_of_seed_epoch_and_index() -> None:
    universes = Universes(8, seed=2)
    volume, target = universes[5]
    assert volume.shape == (1, 8, 8, 8)
    assert target.shape == (2,)
    assert float(target.abs().max()) <= 1.0
    assert torch.equal(volume, Universes(8, seed=2)[5][0])
    universes.set_epoch(1)
    assert not torch.equal(volume, universes[5][0])
    with pytest.raises(IndexError):
        universes[10**6]


def test_the_mean_density_is_one_and_sigma_8_makes_clumps() -> None:
    volumes, targets = (torch.stack(part) for part in zip(*[Universes(16)[i] for i in range(60)], strict=True))
    density = torch.expm1(MIDDLE + SPREAD * volumes.double())
    assert float(density.mean()) == pytest.approx(1.0, rel=0.02)
    spread = density.std((1, 2, 3, 4))
    assert float(torch.corrcoef(torch.stack([spread, targets[:, 1].double()]))[0, 1]) > 0.6


def test_the_spectrum_has_the_spread_that_sigma_8_says() -> None:
    """In a Gaussian field that is smoothed over spheres of 8 Mpc/h, on a fine grid."""
    side, cell, omega_m = 64, 2.0, 0.3
    axis = np.fft.fftfreq(side, cell) * 2 * np.pi
    k = np.sqrt(axis[:, None, None] ** 2 + axis[None, :, None] ** 2 + axis[None, None, :] ** 2)
    k[0, 0, 0] = 1.0
    x = 8.0 * k
    window = 3.0 * (np.sin(x) - x * np.cos(x)) / x**3
    spectrum = power(k, omega_m) * amplitude(omega_m) * window**2
    spectrum[0, 0, 0] = 0.0
    variance = spectrum.sum() / (side * cell) ** 3
    assert variance == pytest.approx(1.0, rel=0.1)  # waves longer than the box are missing


def test_the_full_network_is_that_of_mlperf_hpc() -> None:
    with torch.device("meta"):
        model = CosmoFlow(parameters=4)
    widths = [layer.out_channels for layer in model.features if isinstance(layer, torch.nn.Conv3d)]
    assert widths == [32, 64, 96, 128, 160]
    assert [layer.in_features for layer in model.head if isinstance(layer, torch.nn.Linear)] == [160 * 64, 128, 64]
    with torch.device("meta"):
        assert CosmoFlow(size="demo")(torch.empty(3, 1, 32, 32, 32)).shape == (3, 2)
