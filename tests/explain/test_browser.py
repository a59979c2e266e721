"""The report in a real browser."""

from pathlib import Path

import pytest

from hocket.explain import explain, report
from hocket.testing import deadline

from .browser import CHROMIUM, Browser
from .test_report import recorded

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on PATH")]


@pytest.mark.parametrize("ranks", [2, 60])
def test_chromium_shows_the_report_without_a_complaint(tmp_path: Path, ranks: int) -> None:
    recorded(tmp_path, ranks, late=1)
    page = tmp_path / "report.html"
    page.write_text(report(explain(tmp_path)))
    with Browser(deadline(60)) as browser:
        for scheme, width in (("light", 1200), ("dark", 360)):
            browser.screen(scheme, width)
            browser.open(page.as_uri())
            assert browser.complaints() == []
            assert browser.first_paint_s() < deadline(2)
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
        cells = "document.getElementById('heat').getContext('2d').getImageData(0, 0, 300, 30).data"
        assert browser.evaluate(f"new Set({cells}).size") > 3, "the heat map is drawn"
        before = browser.evaluate("document.getElementById('timeline').toDataURL()")
        browser.evaluate(
            "document.getElementById('timeline').dispatchEvent(new KeyboardEvent('keydown', {key: '+'})), 0"
        )
        assert browser.evaluate("document.getElementById('timeline').toDataURL()") != before, "and the timeline zooms"
        assert browser.complaints() == []
