"""Real headless Chromium, for the tests of the report and for its screenshots."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]  # a closed network refuses them by the dozen


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser: Any, file: Path, width: int = 1280, height: int = 900, theme: str = "light") -> Iterator[Any]:
    """The page of a file, with what went wrong on it in `page.troubles`."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
    page = context.new_page()
    page.troubles = []
    page.on("console", lambda m: page.troubles.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("request", lambda r: page.troubles.append(r.url) if not r.url.startswith("file:") else None)
    try:
        page.goto(file.resolve().as_uri())
        page.wait_for_selector("html[data-ready=true]")
        yield page
    finally:
        context.close()
