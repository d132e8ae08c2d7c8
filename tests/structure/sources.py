"""The checkout as the structure tests see it: its files, Rust code without comments and texts, Markdown tables."""

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_RUST_COMMENT = r"//[^\n]*|/\*.*?\*/"
_RUST_TEXT = r'b?r(#*)".*?"\1|b?"(?:\\.|[^"\\])*"|b?\'(?:\\[^\n]{1,10}?|[^\\\'\n])\''


@functools.cache
def files(*suffixes: str) -> tuple[str, ...]:
    """Files that end in one of `suffixes`, tracked or not yet tracked but not ignored either; relative to the root."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = sorted({name for name in listing.split("\0") if name and (ROOT / name).is_file()})
    return tuple(name for name in names if name.endswith(suffixes or ""))


def read(name: str) -> str:
    """The text of a file, named relative to the root."""
    path = ROOT / name
    assert path.is_file(), f"{name} is missing"
    return path.read_text(encoding="utf-8")


def rust_code(text: str, *, keep_texts: bool = False) -> str:
    """Rust source with comments (and, unless kept, text literals) blanked; lines and columns stay where they are."""
    pattern = f"(?P<text>{_RUST_TEXT})|{_RUST_COMMENT}".replace(r"\1", r"\2")

    def blank(match: re.Match[str]) -> str:
        if keep_texts and match["text"]:
            return match[0]
        return re.sub(r"[^\n]", " ", match[0])

    return re.sub(pattern, blank, text, flags=re.DOTALL)


def block_end(code: str, start: int) -> int:
    """The position behind the `}` that closes the first `{` at or after `start`; `code` without comments and texts."""
    depth = 0
    for match in re.compile(r"[{}]").finditer(code, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.end()
    return len(code)


def unit_tests(code: str) -> list[tuple[int, int]]:
    """Where the `#[cfg(test)]` modules of Rust code begin and end."""
    found = re.finditer(r"#\[cfg\(test\)\]\s*(?:#\[[^\]]*\]\s*)*(?:pub\(crate\)\s+)?mod\s+\w+\s*\{", code)
    return [(match.start(), block_end(code, match.start())) for match in found]


def without_unit_tests(code: str) -> str:
    """Rust code with its `#[cfg(test)]` modules blanked."""
    for start, end in unit_tests(code):
        code = code[:start] + re.sub(r"[^\n]", " ", code[start:end]) + code[end:]
    return code


def table(markdown: str, *header: str) -> list[dict[str, str]]:
    """The rows of the one Markdown table whose columns are called `header`."""
    rows: list[dict[str, str]] | None = None
    for line in markdown.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if cells == list(header):
            assert rows is None, f"two tables with the columns {header}"
            rows = []
        elif rows is not None and line.strip() == "":
            break
        elif rows is not None and not set(line) <= set("|-: "):
            rows.append(dict(zip(header, cells, strict=True)))
    assert rows, f"no table with the columns {header}"
    return rows


@functools.cache
def cargo_metadata(*arguments: str) -> dict[str, Any]:
    """What cargo says of the workspace."""
    command = ["cargo", "metadata", "--format-version", "1", *arguments]
    metadata: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    return metadata


def offenders(remedy: str, found: list[str]) -> None:
    """Fails with every offender and what to do about them."""
    assert not found, "\n".join(["", *found, f"Remedy: {remedy}"])
