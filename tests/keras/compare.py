"""Results of a program, however deep they are nested, beside those of plain Keras."""

from typing import Any

import numpy as np
import torch

TOLERANCE = 2e-4 if torch.cuda.is_available() else 2e-5
"""Of float32 in some tens of steps; most differences are below 1e-6. A GPU adds up batches of other sizes otherwise."""


def flat(value: Any, path: str = "") -> dict[str, np.ndarray]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{path}/{i}").items()}
    return {path: np.asarray(value, dtype=np.float64)}


def check(wanted_result: Any, results: list[Any]) -> None:
    wanted = flat(wanted_result)
    assert wanted
    for rank, result in enumerate(results):
        got = flat(result)
        assert got.keys() == wanted.keys()
        for path, value in wanted.items():
            np.testing.assert_allclose(got[path], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"rank {rank}: {path}")
