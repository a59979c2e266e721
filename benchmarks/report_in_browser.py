"""The report in a real browser: errors, the first paint, the size, and what axe-core finds, for 2, 8 and 1,000 ranks.

    python -m benchmarks.report_in_browser
    python -m benchmarks.report_in_browser --axe package/axe.min.js --screenshots docs     # `npm pack axe-core` has it
    python -m benchmarks.report_in_browser --run runs/edsr-TIME --screenshots docs         # report.png, of that run

The runs are made up: steps of 14 ms and an all-reduce, one rank later than the others, written by the recorder itself.
It needs Chromium, and 6.3 MiB of disk a rank for a moment. Each page is opened on a light and a dark screen, and on a
narrow one as a telephone's.
"""  # noqa: D400

import argparse
import tempfile
import time
from pathlib import Path

from tests.explain.browser import CHROMIUM, Browser
from tests.explain.test_report import recorded

SCREENS = (("light", "light", 1200), ("dark", "dark", 1200), ("narrow", "light", 360))


def main() -> None:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,8,1000", help="with commas between them")
    parser.add_argument("--axe", type=Path, help="axe.min.js of axe-core, which looks at each page, too")
    parser.add_argument("--screenshots", type=Path, help="folder for report-2.png and so on")
    parser.add_argument("--run", type=Path, help="only a picture of this run's report, report.png in --screenshots")
    given = parser.parse_args()
    if CHROMIUM is None:
        parser.error("there is no chromium on PATH; Debian has it in the package of this name")
    from hocket.explain import explain, report

    if given.run:
        with tempfile.TemporaryDirectory() as folder, Browser(60.0) as browser:
            page = Path(folder) / "report.html"
            page.write_text(report(explain(given.run)))
            browser.screen("light", 1200)
            browser.open(page.as_uri())
            ((given.screenshots or Path()) / "report.png").write_bytes(browser.screenshot())
        return
    print("| ranks | made in s | KB | first paint s: light, dark, narrow | console's complaints | axe-core: serious |")
    print("|---|---|---|---|---|---|")
    said: list[str] = []
    with Browser(60.0) as browser:
        for ranks in map(int, given.ranks.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                recorded(Path(folder), ranks, late=ranks - 1)
                begin_s = time.process_time()
                text = report(explain(folder))
                made_s = time.process_time() - begin_s
                page = Path(folder) / "report.html"
                page.write_text(text)
                paints_s, complaints, problems = [], 0, 0
                for screen, scheme, width in SCREENS:
                    browser.screen(scheme, width)
                    browser.open(page.as_uri())
                    paints_s.append(browser.first_paint_s())
                    if given.axe:
                        found = browser.problems(given.axe.read_text())
                        problems += len(found)
                        said += [f"{ranks} ranks, {screen}: {one}" for one in found]
                    found = browser.complaints()
                    complaints += len(found)
                    said += [f"{ranks} ranks, {screen}: {one}" for one in found]
                    if given.screenshots and screen == "light":
                        (given.screenshots / f"report-{ranks}.png").write_bytes(browser.screenshot())
            paints = ", ".join(f"{seconds:.2f}" for seconds in paints_s)
            axe = str(problems) if given.axe else "-"
            print(f"| {ranks} | {made_s:.1f} | {len(text) / 1e3:.0f} | {paints} | {complaints} | {axe} |")
    print(*said, sep="\n")


if __name__ == "__main__":
    main()
