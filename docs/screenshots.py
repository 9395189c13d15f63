"""Takes the pictures of the report that the README and the documentation show.

`make screenshots`: plans the demo's transformer for 8 replicas and opens its report in headless Chromium.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from browser import CHROMIUM, chromium, opened  # noqa: E402

VIEWS = (
    ("report.png", 1280, 900, "light"),
    ("report-dark.png", 1280, 900, "dark"),
    ("report-phone.png", 390, 844, "dark"),
)


def main() -> int:
    if CHROMIUM is None:
        print("Chromium is not installed (Debian: apt-get install chromium)", file=sys.stderr)
        return 1
    (HERE / "images").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        report = Path(folder) / "report.html"
        program = Path(folder) / "train.py"  # the name that the page shows
        program.write_text("from shardstep._src.tools.demo.run import example\n", encoding="utf-8")
        command = [sys.executable, "-m", "shardstep", "explain", "train.py:example", "--html", str(report)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        for name, width, height, theme in VIEWS:
            with opened(browser, report, width, height, theme) as page:
                page.wait_for_timeout(500)
                page.screenshot(path=HERE / "images" / name)
                print(HERE / "images" / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
