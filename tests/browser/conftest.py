"""Tests that only the environment of scripts/browser.sh has the packages for; elsewhere there is nothing to collect."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

IS_THERE = importlib.util.find_spec("playwright") is not None

collect_ignore_glob = [] if IS_THERE else ["test_*.py"]

CHROMIUM = shutil.which(os.environ.get("SHARDFAST_CHROMIUM", "chromium"))
QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]


class Made(NamedTuple):
    """A page, and what the command says of the same run."""

    page: Path
    report: dict[str, Any]
    trace: Path


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> dict[str, Made]:
    """The runs ``real`` and ``large`` of pages.py, with their reports."""
    into = tmp_path_factory.mktemp("runs")
    python = os.environ.get("SHARDFAST_BROWSER_PYTHON", sys.executable)
    subprocess.run([python, Path(__file__).with_name("pages.py"), into], check=True, timeout=1200)
    names = ("real", "large")
    return {
        name: Made(into / f"{name}.html", json.loads((into / f"{name}.json").read_text()), into / f"{name}.trace.json")
        for name in names
    }


@pytest.fixture(scope="session")
def events(runs) -> list[dict[str, Any]]:
    """The events of all processes of the run ``real``, as they wrote them."""
    return [json.loads(line) for line in (runs["real"].page.parent / "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield launched
        launched.close()


@pytest.fixture
def shown(browser, runs, request) -> Iterator[Callable]:
    """``shown(name, **options)`` opens a page; in the end it has asked for nothing else, and its console is empty."""
    opened = []
    said: list[str] = []

    def show(name: str, *, width: int = 1200, height: int = 900, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        page = context.new_page()
        url = f"file://{runs[name].page}"
        page.on("console", lambda message: said.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda asked: said.append(f"request: {asked.url}") if asked.url != url else None)
        page.goto(url)
        opened.append((name, context, page))
        return page

    yield show
    if pictures := os.environ.get("SHARDFAST_PICTURES"):
        Path(pictures).mkdir(parents=True, exist_ok=True)
        for number, (name, _, page) in enumerate(opened):
            page.screenshot(path=Path(pictures) / f"{request.node.name}-{name}-{number}.png", full_page=True)
    for _, context, _ in opened:
        context.close()
    assert said == []
