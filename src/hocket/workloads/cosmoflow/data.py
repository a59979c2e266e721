"""Synthetic universes: lognormal fields with the power spectrum of cold dark matter, made with a Fourier transform.

They stand in for N-body simulations: two parameters decide how strong and how coarse the clumps are, and are the
targets. Nothing is simulated and nothing fetched.

Sources: Bardeen et al. 1986 (the transfer function, equation G3); Coles and Jones 1991 (lognormal fields). Ranges of
the parameters: Ravanbakhsh et al. 2016, widened.
"""

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hocket.workloads._drawn import Drawn
from hocket.workloads.cosmoflow.settings import VOLUMES_PER_EPOCH

NAMES = ("omega_m", "sigma_8")
MIDDLE, SPREAD = 0.6, 0.5
"""About the mean and the standard deviation of log(1 + density): what is left has a mean of 0 and a spread of 1."""

_RANGES = ((0.1, 0.5), (0.5, 1.1))
_CELL = 4.0  # Mpc/h
_HUBBLE = 0.7
_TILT = 0.96
_RADIUS = 8.0  # Mpc/h, of the spheres in which sigma_8 is the spread of the density

Floats = npt.NDArray[np.float64]


def power(k: Floats, omega_m: float) -> Floats:
    """Return the power spectrum, up to a factor, at wave numbers k > 0 in h/Mpc."""
    q = k / (omega_m * _HUBBLE)
    polynomial = 1.0 + 3.89 * q + (16.1 * q) ** 2 + (5.46 * q) ** 3 + (6.71 * q) ** 4
    transfer = np.log(1.0 + 2.34 * q) / (2.34 * q) * polynomial**-0.25
    spectrum: Floats = k**_TILT * transfer**2
    return spectrum


@functools.lru_cache(maxsize=4096)
def amplitude(omega_m: float) -> float:
    """By what the spectrum must be multiplied so that the density in spheres of 8 Mpc/h has a spread of one."""
    k = np.geomspace(1e-4, 20.0, 400)
    x = k * _RADIUS
    window = 3.0 * (np.sin(x) - x * np.cos(x)) / x**3
    integrand = power(k, omega_m) * window**2 * k**3 / (2.0 * np.pi**2)
    return float(1.0 / np.trapezoid(integrand, np.log(k)))


class Universes(Drawn[tuple[Tensor, Tensor]]):
    """Item ``index`` is a volume (1, side, side, side) and its parameters (2,): float32, each scaled to [-1, 1].

    A cell is log(1 + density), the mean density being 1, shifted and scaled (`MIDDLE`, `SPREAD`). A volume is a
    function of (seed, epoch, index) alone, so that it does not matter which worker makes it. A side has cells of 4
    Mpc/h.
    """

    def __init__(self, side: int, *, seed: int = 0, length: int = VOLUMES_PER_EPOCH) -> None:
        super().__init__(seed=seed, length=length)
        self._side = side
        axis = np.fft.fftfreq(side, _CELL) * 2.0 * np.pi
        half = np.fft.rfftfreq(side, _CELL) * 2.0 * np.pi
        square = axis[:, None, None] ** 2 + axis[None, :, None] ** 2 + half[None, None, :] ** 2
        # Few wave numbers differ in size: the spectrum is worked out for each of these once.
        squares, self._which = np.unique(square.round(12), return_inverse=True)
        self._k = np.sqrt(np.maximum(squares, 1e-9))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = self.random(index)
        place = random.uniform(-1.0, 1.0, size=2)
        omega_m, sigma_8 = (low + (high - low) * (x + 1) / 2 for (low, high), x in zip(_RANGES, place, strict=True))
        spectrum = power(self._k, omega_m) * amplitude(round(omega_m, 4)) * sigma_8**2
        spectrum[0] = 0.0  # the mean density is known
        shape = (self._side,) * 3
        white = np.fft.rfftn(random.standard_normal(shape))
        scale = np.sqrt(spectrum / _CELL**3)[self._which].reshape(white.shape)
        field = np.fft.irfftn(white * scale, s=shape, axes=(0, 1, 2))
        volume = (np.log1p(np.exp(field - field.var() / 2.0)) - MIDDLE) / SPREAD
        return torch.from_numpy(volume.astype(np.float32)[None]), torch.from_numpy(place.astype(np.float32))
