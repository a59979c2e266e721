"""When receives are posted."""

from types import SimpleNamespace
from typing import Any

import pytest

from hocket.parallel.pipeline._run import Run
from hocket.schedule.pipeline import PipelineAction

SEND, FORWARD, BACKWARD = (PipelineAction(1, kind, 0) for kind in ("SEND_F", "RECV_F", "RECV_B"))


@pytest.mark.parametrize(("known", "expected"), [(True, [FORWARD, BACKWARD, SEND]), (False, [SEND, FORWARD, BACKWARD])])
def test_receives_come_before_sends_unless_one_needs_a_description(
    known: bool, expected: list[PipelineAction], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "_key", lambda *_: ())
    run: Any = object.__new__(Run)
    run._homes, run._wire = (0, 1, 0, 1), SimpleNamespace(knows=lambda peer, key: known)
    assert run._receives_first([SEND, FORWARD, BACKWARD]) == expected
