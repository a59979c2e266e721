import numpy as np
import pytest
import torch

from hocket.workloads.cosmoflow.data import REDSHIFTS, Universes, amplitude, growth, power
from hocket.workloads.cosmoflow.model import CosmoFlow


def test_a_volume_is_a_function_of_seed_epoch_and_index() -> None:
    universes = Universes(8, seed=2)
    volume, target = universes[5]
    assert volume.shape == (len(REDSHIFTS), 8, 8, 8)
    assert target.shape == (2,)
    assert float(target.abs().max()) <= 1.0
    assert torch.equal(volume, Universes(8, seed=2)[5][0])
    universes.set_epoch(1)
    assert not torch.equal(volume, universes[5][0])
    with pytest.raises(IndexError):
        universes[10**6]


def test_the_mean_density_is_one_and_clumps_grow_with_time() -> None:
    volumes = torch.stack([Universes(16)[i][0] for i in range(20)]).double()
    density = torch.expm1(volumes)
    assert float(density.mean()) == pytest.approx(1.0, rel=0.02)
    spread = density.std((0, 2, 3, 4))
    assert list(spread) == sorted(spread, reverse=True)
    for omega_m in (0.1, 0.3, 0.5):
        times = [growth(omega_m, z) for z in REDSHIFTS]
        assert times[0] == 1.0
        assert times == sorted(times, reverse=True)
    # In a universe of matter alone clumps grow as the universe does.
    assert growth(1.0, 1.0) == pytest.approx(0.5, rel=1e-3)


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
        assert CosmoFlow(size="demo")(torch.empty(3, 4, 32, 32, 32)).shape == (3, 2)
