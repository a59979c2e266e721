"""The bundled workloads with samples divided: every step's loss in float64 is that of one process."""

from __future__ import annotations

import pytest

from benchmarks import equivalence, spatial
from hocket.testing import run_ranks


@pytest.mark.long
@pytest.mark.parametrize("name", ["cosmoflow", "climate"])
def test_a_workload_on_slabs_loses_what_one_process_loses(name: str) -> None:
    reference = {optimizer: equivalence.alone(name, optimizer) for optimizer in equivalence.OPTIMIZERS}
    for ranks, title in ((2, "spatial"), (4, "data x spatial, gradients")):
        plans = {title: spatial.EQUIVALENCE[ranks][title]}
        for found in run_ranks(equivalence.by_plans, ranks, name, plans, timeout_s=110):
            for (optimizer, _), losses in found.items():
                apart = equivalence.difference(losses, reference[optimizer])
                assert isinstance(apart, float), apart
                assert apart <= equivalence.TOLERANCE, (optimizer, title)
