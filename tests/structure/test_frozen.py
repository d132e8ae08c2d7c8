"""What is declared twice: the format in Rust and in its specification, the kinds of failure in Rust and Python.

The specification's tables and its worked example are compared by crates/format/tests/format/specification.rs.
"""

import ast
import re

import pytest
from sources import files, offenders, read, rust_code

SPECIFICATION = "docs/format.md"
REMEDY = f"bring {SPECIFICATION} up to date; stored numbers and names are only ever appended (CONTRIBUTING.md)"


def format_sources() -> str:
    names = [name for name in files(".rs") if name.startswith("crates/format/src/")]
    return "\n".join(rust_code(read(name), keep_texts=True) for name in names)


def constant(code: str, name: str) -> str:
    found = re.search(rf"\bconst {name}: \w+ = ([^;]+);", code)
    assert found is not None, f"crates/format/src has no constant {name}"
    return found[1].replace("_", "").strip('"')


def test_the_specification_is_of_this_version():
    code = format_sources()
    version = f"{constant(code, 'FORMAT_MAJOR')}.{constant(code, 'FORMAT_MINOR')}"
    stated = re.search(r"\b[Vv]ersion:?\**\s*(\d+\.\d+)\b", read(SPECIFICATION))
    assert stated is not None, f"{SPECIFICATION} does not say `Version {version}`"
    assert stated[1] == version, f"{SPECIFICATION} is of version {stated[1]}, the code of {version}. Remedy: {REMEDY}"


def test_metadata_keys_are_specified():
    keys = set(re.findall(r'"(shardfast\.[\w.]+)"', format_sources()))
    assert keys
    page = read(SPECIFICATION)
    offenders(REMEDY, [key for key in sorted(keys) if not re.search(rf"{re.escape(key)}(?![\w.])", page)])


def test_constants_are_specified():
    code = format_sources()
    numbers = {name: constant(code, name) for name in ("BLOCK_BYTES", "DATA_ALIGNMENT", "DEPTH_MAX", "NDIM_MAX")}
    page = read(SPECIFICATION).replace(",", "").replace("_", "")
    missing = [f"{name} = {number}" for name, number in numbers.items() if not re.search(rf"\b{number}\b", page)]
    offenders(REMEDY, missing)


# Kinds of failure


def rust_kinds() -> list[str]:
    code = rust_code(read("crates/transfer/src/error.rs"), keep_texts=True)
    kinds = re.findall(r'\bKind::(\w+) => "(\w+)",', code)
    assert kinds
    assert all(variant == name for variant, name in kinds), kinds
    return [name for _, name in kinds]


def exception_classes(tree: ast.Module) -> set[str]:
    """Exceptions that a module defines or takes from `native`."""
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id == "Error" for b in node.bases)
    }
    taken = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "native"
        for alias in node.names
    }
    return (defined | taken) - {"Error"}


@pytest.mark.parametrize("name", ["python/shardfast/errors.py", "python/shardfast/_native.pyi"])
def test_kinds_of_failure_are_the_same_in_both_languages(name):
    assert exception_classes(ast.parse(read(name))) == set(rust_kinds()), (
        f"Remedy: {name} has one exception class for each kind of crates/transfer/src/error.rs, and no other"
    )
