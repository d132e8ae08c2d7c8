"""Runs what the pages of the guide show: their Python, their commands, and that these print what the page says."""

from pathlib import Path

import pytest
import shardfast as sf
from pages import ROOT, blocks, likeness, run_page

# DCP says so whenever it is shown with one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "guide").glob("*.md"))
WITH_CODE = [page for page in PAGES if any(block.language in ("python", "sh") for block in blocks(page))]


def waiting(method):
    """The method, which then waits until every save is durable."""

    def and_wait(self: sf.Checkpointer, *arguments, **named):
        answer = method(self, *arguments, **named)
        self.wait()
        return answer

    return and_wait


@pytest.mark.parametrize("page", WITH_CODE)
def test_a_page_runs(page: str, ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # As in a training, whose saves end before the next one: those of a page's few steps would overtake each other, and
    # which steps are still leaving in the end would be chance.
    for name in ("save", "step"):
        monkeypatch.setattr(sf.Checkpointer, name, waiting(getattr(sf.Checkpointer, name)))
    (tmp_path / "page").mkdir()
    monkeypatch.chdir(tmp_path / "page")
    run_page(page, ranks)


def test_every_page_is_in_the_contents():
    contents = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines()
    pages = [line.strip() for line in contents if line.startswith("guide/")]
    assert sorted(pages) == [page.removeprefix("docs/").removesuffix(".md") for page in PAGES]


def test_the_readme_leads_to_every_page():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page for page in PAGES if f"({page})" not in readme] == []


def test_languages_are_those_that_run_or_show():
    shown = {block.language for page in PAGES for block in blocks(page)}
    assert shown <= {"python", "sh", "text"}, shown


def test_likeness_forgets_numbers_and_keeps_words():
    assert likeness("a  12.5 KiB\n\nb 81a9fc265d3af4f9") == likeness("a 3 KiB\nb 0000000000000000")
    assert likeness("a 1 file") != likeness("a 1 files")
