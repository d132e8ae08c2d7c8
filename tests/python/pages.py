"""The code that a Markdown page shows, in the order in which a reader meets it."""

import ast
import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

# A fenced block, with the comment before it that says on how many ranks it runs.
FENCE = re.compile(r"(?:^<!-- ranks: (\d+) -->\n+)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# Statements that a block on ranks has from the blocks before it.
DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


class Block(NamedTuple):
    """A block of code of a page."""

    name: str  # for tracebacks: the page and the block's first line
    language: str
    text: str
    ranks: int  # 0: runs in the process of the test
    is_adjacent: bool  # only white space stands between it and the block before


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found, end = [], 0
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start(3)) + 1
        is_adjacent = not text[end : match.start()].strip()
        found.append(Block(f"{page}:{line}", match[2], match[3], int(match[1] or 0), is_adjacent))
        end = match.end()
    return found


def shell_lines(page: str) -> list[list[str]]:
    shown = [block.text for block in blocks(page) if block.language == "sh"]
    return [shlex.split(line) for text in shown for line in text.splitlines() if line.strip()]


def run_command(words: list[str]) -> str:
    """Runs a `shardfast` command as the page shows it; what it prints."""
    program = Path(sys.executable).with_name(words[0])
    ran = subprocess.run([program, *words[1:]], capture_output=True, text=True, timeout=240)
    # `diff` and `verify` say by exit code 1 what they found.
    allowed = (0, 1) if words[1] in ("diff", "verify") else (0,)
    assert ran.returncode in allowed, f"{shlex.join(words)}: exit {ran.returncode}\n{ran.stdout}{ran.stderr}"
    assert ran.stdout.strip(), f"{shlex.join(words)} printed nothing"
    return ran.stdout


def execute(block: Block, namespace: dict[str, object]) -> str:
    """Runs a Python block; what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.text, block.name, "exec"), namespace)
    return printed.getvalue()


def definitions(block: Block) -> Block:
    """What the block imports and defines."""
    kept = [line for line in ast.parse(block.text).body if isinstance(line, DEFINES)]
    return block._replace(text=ast.unparse(ast.Module(kept, [])))


def execute_on_rank(rank: int, world: int, before: list[Block], block: Block) -> str:
    """Runs a Python block behind what others define; what it prints."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for one in before:
        execute(definitions(one), namespace)
    return execute(block, namespace)


def likeness(output: str) -> list[str]:
    """Lines of output without what differs from run to run: numbers, dates, names of attempts, directories, widths."""
    plain = re.sub(r"\b[0-9a-f]{16}\b|\b\d[\d.,:e-]*", "0", re.sub(r"file:///\S*/", "file:///", output))
    return [" ".join(line.split()) for line in plain.splitlines() if line.strip()]


def run_page(page: str, ranks: Callable) -> None:
    """Runs the page's Python and its `shardfast` commands in order.

    A `text` block directly behind one of these shows what it prints. Unmarked Python shares one namespace; a block on
    ranks begins with what that has imported and defined.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    before: list[Block] = []
    printed = ""
    for block in blocks(page):
        if block.language == "python" and block.ranks:
            printed = ranks(block.ranks)(execute_on_rank, before, block)[0]
        elif block.language == "python":
            printed = execute(block, namespace)
            before.append(block)
        elif block.language == "sh":
            lines = [line for line in block.text.splitlines() if line.startswith("shardfast ")]
            printed = "".join(run_command(shlex.split(line)) for line in lines)
        elif block.language == "text" and block.is_adjacent and printed:
            assert likeness(block.text) == likeness(printed), f"{block.name} is not what is printed:\n{printed}"
