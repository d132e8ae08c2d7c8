"""Names, sizes and words that nobody should have to argue about in a review."""

import ast
import re

import pytest
from sources import block_end, files, offenders, read, rust_code

FILE_LINES_MAX = 700
TEST_FILE_LINES_MAX = 900
FUNCTION_LINES_MAX = 100
LINE_COLUMNS_MAX = 120

FORBIDDEN_NAME = re.compile(r"utils|common|helpers|manager|base")
# Spelled so that this file does not offend.
FORBIDDEN_WORD = re.compile(r"\bT[O]DO\b|\bFIX[M]E\b|\bXX[X]\b|\bunimplemente[d]!|\btod[o]!|\bdb[g]!")
MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:hom[e]|roo[t]|User[s]|wor[k])/")

# Paths whose documentation is held to the rule of `test_documentation_begins_with_a_verb_or_a_noun`. Only appended to.
HELD = [
    "crates/cli/",
    "crates/coord/",
    "crates/engine/",
    "crates/format/",
    "crates/multistep/",
    "crates/native/",
    "crates/optim/",
    "crates/plan/",
    "crates/store/",
    "crates/tools/",
    "crates/transfer/",
    "python/",
]
RIDDLE = re.compile(r"(?:What|Where|Those|So many|As|Of|It)\b")
DOC_WORDS_MIN = 3

SOURCES = (".rs", ".py", ".pyi", ".sh")


def is_test(name: str) -> bool:
    return name.startswith("tests/") or "/tests/" in name or name.endswith("/tests.rs")


def test_no_file_is_called_after_a_drawer():
    found = [
        name
        for name in files(*SOURCES)
        if any(FORBIDDEN_NAME.search(part.rsplit(".", 1)[0]) for part in name.split("/"))
    ]
    offenders("name the file after what it does, or give its parts to the files that need them", found)


def test_files_have_one_charter_each():
    found = []
    for name in files(*SOURCES):
        lines, most = read(name).count("\n"), TEST_FILE_LINES_MAX if is_test(name) else FILE_LINES_MAX
        if lines > most:
            found.append(f"{name}: {lines} lines, at most {most}")
    offenders("split the file by charter", found)


def rust_functions(text: str) -> list[tuple[str, int, int]]:
    """Name, first line and number of lines of every function with a body."""
    code = rust_code(text)
    found = []
    for match in re.finditer(r"\bfn\s+(\w+)", code):
        opening = body_start(code, match.end())
        if opening is not None:
            end = block_end(code, opening)
            found.append((match[1], code.count("\n", 0, match.start()) + 1, code.count("\n", match.start(), end) + 1))
    return found


def body_start(code: str, start: int) -> int | None:
    """Where the body of the function whose name ends at `start` begins; `None` for a declaration."""
    depth = 0
    for match in re.compile(r"[()\[\]{};]").finditer(code, start):
        if match[0] in "([":
            depth += 1
        elif match[0] in ")]":
            depth -= 1
        elif depth == 0:
            return match.start() if match[0] == "{" else None
    return None


def python_functions(text: str) -> list[tuple[str, int, int]]:
    return [
        (node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


@pytest.mark.parametrize(("suffix", "functions"), [(".rs", rust_functions), (".py", python_functions)])
def test_functions_fit_on_two_screens(suffix, functions):
    found = [
        f"{name}:{line}: {function} has {lines} lines, at most {FUNCTION_LINES_MAX}"
        for name in files(suffix)
        for function, line, lines in functions(read(name))
        if lines > FUNCTION_LINES_MAX
    ]
    offenders("give the parts names", found)


def test_nothing_is_left_for_later():
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in files(*SOURCES, ".toml")
        for number, line in enumerate(read(name).splitlines(), 1)
        if FORBIDDEN_WORD.search(line)
    ]
    offenders("do it now, or open an issue and remove the mark", found)


def test_lines_fit():
    found = [
        f"{name}:{number}: {len(line)} columns"
        for name in files(*SOURCES)
        for number, line in enumerate(read(name).splitlines(), 1)
        if len(line) > LINE_COLUMNS_MAX
    ]
    offenders(f"break the line at {LINE_COLUMNS_MAX} columns (formatters leave comments and texts alone)", found)


def test_no_machine_is_mentioned():
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in files(*SOURCES, ".toml", ".md", ".txt", "Makefile", ".ci/run")
        for number, line in enumerate(read(name).splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    offenders("name a place that every machine has (a temporary directory, a path inside the checkout)", found)


def test_every_rust_file_says_its_charter_first():
    found = [
        name
        for name in files(".rs")
        if "/src/" in name
        and not is_test(name)
        and not re.sub(r"\A(#!\[[^\n]*\n|\s)+", "", read(name)).startswith("//!")
    ]
    offenders("begin the file with `//!` and one line that says what it is for", found)


def rust_docs(text: str) -> list[tuple[int, str]]:
    """First line and words of every doc comment of Rust source: a run of lines with one mark."""
    found: list[tuple[int, str]] = []
    mark, before = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r"\s*(//!|///(?!/))(.*)", line)
        if match is None:
            continue
        if match[1] == mark and before == number - 1:
            found[-1] = (found[-1][0], f"{found[-1][1]} {match[2].strip()}".strip())
        else:
            found.append((number, match[2].strip()))
        mark, before = match[1], number
    return found


def python_docs(text: str) -> list[tuple[int, str]]:
    """First line and words of every docstring of Python source."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return [(node.body[0].lineno, ast.get_docstring(node) or "") for node in nodes if ast.get_docstring(node)]


DOCS = [("crates/", ".rs", rust_docs), ("python/", ".py", python_docs), ("python/", ".pyi", python_docs)]


def riddles(text: str, docs) -> list[tuple[int, str]]:
    """First line and beginning of every piece of documentation that needs the code to be understood."""
    found = [(line, " ".join(words.split())) for line, words in docs(text)]
    return [(line, words[:60]) for line, words in found if RIDDLE.match(words) or len(words.split()) < DOC_WORDS_MIN]


@pytest.mark.parametrize(("root", "suffix", "docs"), DOCS)
def test_documentation_begins_with_a_verb_or_a_noun(root, suffix, docs):
    found = [
        f"{name}:{line}: {words}"
        for name in files(suffix)
        if name.startswith(root) and name.startswith(tuple(HELD))
        for line, words in riddles(read(name), docs)
    ]
    offenders(
        "begin a function's documentation with a verb in the third person (`Returns …`), that of a field, constant or "
        f"type with its noun and unit (`Offset in the file, in bytes`), in at least {DOC_WORDS_MIN} words",
        found,
    )


@pytest.mark.parametrize(
    ("text", "docs", "lines"),
    [
        ("//! Where it lies.\n\n/// Of its\n/// elements, in bytes.\nfn f() {}\n", rust_docs, [1, 3]),
        ("    /// Too short.\n    a: u8,\n    /// Offset in\n    /// bytes.\n    b: u8,\n", rust_docs, [1]),
        ("/// Bytes are told.\n#[x]\n//// What is no documentation.\n// Nor this.\n", rust_docs, []),
        ('"""As said."""\n\n\ndef f():\n    """So many bytes at once."""\n', python_docs, [1, 5]),
        ('class A:\n    """Holds the\n    lock."""\n\n    x = """What is no docstring"""\n', python_docs, []),
    ],
)
def test_riddles_are_found(text, docs, lines):
    assert [line for line, _ in riddles(text, docs)] == lines


def test_what_is_held_exists():
    found = [path for path in HELD if not any(name.startswith(path) for name in files(".rs", ".py", ".pyi"))]
    offenders("remove the path from `HELD`, or spell it as it is now", found)
