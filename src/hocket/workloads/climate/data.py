"""Synthetic weather: 16 fields on a map, with whirls like tropical cyclones and bands like atmospheric rivers.

They stand in for the fields of a climate model: the channels have the names of those of Kurth et al. 2018 and roughly
behave alike, no physics is solved and nothing is fetched. A label says for each pixel whether it belongs to a cyclone,
a river, or neither.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hocket.workloads._drawn import Drawn
from hocket.workloads.climate.settings import MAPS_PER_EPOCH

CHANNELS = (
    "TMQ", "U850", "V850", "UBOT", "VBOT", "QREFHT", "PS", "PSL",
    "T200", "T500", "PRECT", "TS", "TREFHT", "Z1000", "Z200", "ZBOT",
)  # fmt: skip
CLASSES = ("background", "cyclone", "river")
SHARES = (0.965, 0.014, 0.021)
"""About how much of the pixels each class has."""

_MOST_CYCLONES = 3
_MOST_RIVERS = 2
_SMOOTH = 6.0  # pixels: the length of the weather that is neither

Floats = npt.NDArray[np.float64]

# How strongly each channel has the moisture of rivers, the moisture, depth and warmth of cyclones, and of which wind.
_MOIST = {"TMQ": 1.0, "QREFHT": 0.8, "PRECT": 0.7}
_DEEP = {"PS": -1.0, "PSL": -1.0, "Z1000": -0.9, "ZBOT": -0.6}
_WARM = {"T500": 0.7, "T200": 0.9, "Z200": 0.5}
_EAST = {"U850": 1.0, "UBOT": 0.7}
_NORTH = {"V850": 1.0, "VBOT": 0.7}
_TROPICAL = {"TMQ": 1.2, "QREFHT": 1.2, "TS": 1.6, "TREFHT": 1.6, "T500": 0.8}


class Maps(Drawn[tuple[Tensor, Tensor]]):
    """Item ``index`` is fields (16, height, breadth), float32, and the class of each pixel (height, breadth), int64.

    Up to three cyclones whirl in the tropics, each in the sense of its hemisphere; up to two rivers leave the tropics
    in an arc. Some lows are as deep as cyclones but neither warm nor moist, and some moist patches are no rivers. A map
    is a function of (seed, epoch, index) alone, so that it does not matter which worker draws it.
    """

    def __init__(self, height: int, breadth: int, *, seed: int = 0, length: int = MAPS_PER_EPOCH) -> None:
        super().__init__(seed=seed, length=length)
        self._shape = (height, breadth)
        wave = np.fft.fftfreq(height)[:, None] ** 2 + np.fft.rfftfreq(breadth)[None, :] ** 2
        length_scale = _SMOOTH * height / 64
        self._filter = np.exp(-2.0 * (np.pi * length_scale) ** 2 * wave)
        self._filter /= np.sqrt((self._filter**2).sum() * 2 / (height * breadth))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = self.random(index)
        height, breadth = self._shape
        noise = random.standard_normal((len(CHANNELS), height, breadth))
        fields = np.fft.irfft2(np.fft.rfft2(noise) * self._filter, s=self._shape)
        fields = 0.5 * fields + 0.1 * noise
        labels = np.zeros(self._shape, dtype=np.int64)
        latitude = np.linspace(-1.0, 1.0, height)[:, None]
        _add(fields, _TROPICAL, np.broadcast_to(np.exp(-4.0 * latitude**2) - 0.5, self._shape))
        for _ in range(random.integers(_MOST_RIVERS + 1)):
            self._river(random, fields, labels)
        for _ in range(random.integers(_MOST_CYCLONES + 1)):
            self._cyclone(random, fields, labels, real=True)
        self._cyclone(random, fields, labels, real=False)
        return torch.from_numpy(fields.astype(np.float32)), torch.from_numpy(labels)

    def _cyclone(self, random: np.random.Generator, fields: Floats, labels: npt.NDArray[np.int64], real: bool) -> None:
        """Add a whirl; one that is not real is a cold and dry low of higher latitudes."""
        height, breadth = self._shape
        side = random.choice((-1.0, 1.0))
        row = height / 2 * (1 + side * (random.uniform(0.1, 0.45) if real else random.uniform(0.4, 0.85)))
        column, radius = random.uniform(0, breadth), random.uniform(0.035, 0.06) * height
        south, east = self._from(row, column)
        distance = np.sqrt(south**2 + east**2) / radius
        core, wind = np.exp(-0.5 * distance**2), distance * np.exp(0.5 - 0.5 * distance**2)
        strength = random.uniform(2.0, 4.0)
        _add(fields, _DEEP, strength * core)
        _add(fields, _EAST, -side * strength * wind * south / (distance * radius + 1e-6))
        _add(fields, _NORTH, side * strength * wind * east / (distance * radius + 1e-6))
        if real:
            _add(fields, _MOIST, 0.7 * strength * core)
            _add(fields, _WARM, 0.7 * strength * core)
            labels[distance < 1.5] = 1

    def _river(self, random: np.random.Generator, fields: Floats, labels: npt.NDArray[np.int64]) -> None:
        """Add a band of moisture from the tropics to higher latitudes, along which the wind blows."""
        height, breadth = self._shape
        side = random.choice((-1.0, 1.0))
        column, lean, bend = random.uniform(0, breadth), random.uniform(0.3, 0.9), random.uniform(-0.3, 0.3)
        width = random.uniform(0.03, 0.045) * height
        along = (np.arange(height)[:, None] + 0.5) / height * 2 - 1  # latitude
        reach = (side * along - 0.2) / 0.5  # from 0 in the tropics to 1 at its end
        middle = column + height * (lean * reach + bend * reach * (1 - reach)) / 2
        _, east = self._from(0.0, 0.0)
        across = (east - middle + breadth / 2) % breadth - breadth / 2
        slope = 1.0 + lean**2
        inside = np.clip(np.minimum(reach, 1 - reach) * 8, 0.0, 1.0)
        profile = np.exp(-0.5 * across**2 / (slope * width**2)) * inside
        strength = random.uniform(1.5, 3.0)
        _add(fields, _MOIST, strength * profile)
        _add(fields, _EAST, strength * profile * lean / np.sqrt(slope))
        _add(fields, _NORTH, side * strength * profile / np.sqrt(slope))
        labels[profile > 0.4] = 2
        # As moist, and round: no river.
        south, east = self._from(random.uniform(0, height), random.uniform(0, breadth))
        blob = np.exp(-0.5 * (south**2 + east**2) / (2.5 * width) ** 2)
        _add(fields, _MOIST, random.uniform(1.0, 2.0) * blob)

    def _from(self, row: float, column: float) -> tuple[Floats, Floats]:
        """Return how far each pixel is from a place, in rows and, around the earth, in columns."""
        height, breadth = self._shape
        rows = np.arange(height, dtype=np.float64)[:, None] - row
        columns = (np.arange(breadth, dtype=np.float64)[None, :] - column + breadth / 2) % breadth - breadth / 2
        return np.broadcast_to(rows, self._shape), np.broadcast_to(columns, self._shape)


def _add(fields: Floats, shares: dict[str, float], pattern: Floats) -> None:
    for name, share in shares.items():
        fields[CHANNELS.index(name)] += share * pattern
