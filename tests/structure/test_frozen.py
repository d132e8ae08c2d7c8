"""What is declared twice: the format in Rust and in its specification, the kinds of failure in Rust and Python."""

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


def enum_order(code: str, name: str) -> list[str]:
    """The variants of an enum by their stored number, as its `ALL` lists them."""
    block = re.search(rf"\bpub const ALL: \[{name}; (\d+)\] = \[(.*?)\];", code, re.DOTALL)
    assert block is not None, f"crates/format/src has no {name}::ALL"
    variants = re.findall(rf"{name}::(\w+)", block[2])
    assert len(variants) == int(block[1])
    return variants


def enum_names(code: str, name: str) -> dict[str, str]:
    return dict(re.findall(rf'\b{name}::(\w+) => "([^"]+)",', code))


def line_with(*words: str) -> bool:
    """Whether one line of the specification holds all the words, each by itself."""
    return any(
        all(re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.]\w|\w)", line) for word in words)
        for line in read(SPECIFICATION).splitlines()
    )


def test_the_specification_is_of_this_version():
    code = format_sources()
    version = f"{constant(code, 'FORMAT_MAJOR')}.{constant(code, 'FORMAT_MINOR')}"
    stated = re.search(r"\b[Vv]ersion:?\**\s*(\d+\.\d+)\b", read(SPECIFICATION))
    assert stated is not None, f"{SPECIFICATION} does not say `Version {version}`"
    assert stated[1] == version, f"{SPECIFICATION} is of version {stated[1]}, the code of {version}. Remedy: {REMEDY}"


def test_element_types_are_specified():
    code = format_sources()
    names = enum_names(code, "DType")
    types = {names[variant]: number for number, variant in enumerate(enum_order(code, "DType"))}
    offenders(REMEDY, [f"{name} = {number}" for name, number in types.items() if not line_with(name, str(number))])


def test_tags_are_specified():
    code = format_sources()
    names, first = enum_names(code, "Tag"), int(constant(code, "FIRST"))
    tags = {names[variant]: first + number for number, variant in enumerate(enum_order(code, "Tag"))}
    offenders(REMEDY, [f"{name} = {number}" for name, number in tags.items() if not line_with(name, str(number))])


def test_columns_are_specified():
    columns = re.findall(r'\bout\.(u8|u32|u64)s\(\s*"([\w.]+)"', format_sources())
    assert len(columns) >= 20, 'the manifest\'s columns are no longer written as `out.u64s("name", …)`: mend this test'
    offenders(REMEDY, [f"{name}: {width}" for width, name in columns if not line_with(name, width.upper())])


def test_metadata_keys_are_specified():
    keys = set(re.findall(r'"(shardfast\.[\w.]+)"', format_sources()))
    assert keys
    offenders(REMEDY, [key for key in sorted(keys) if not line_with(key)])


def test_constants_are_specified():
    code = format_sources()
    numbers = {name: constant(code, name) for name in ("BLOCK_BYTES", "DATA_ALIGNMENT", "DEPTH_MAX", "NDIM_MAX")}
    page = read(SPECIFICATION).replace(",", "").replace("_", "")
    missing = [f"{name} = {number}" for name, number in numbers.items() if not re.search(rf"\b{number}\b", page)]
    offenders(REMEDY, missing)


# Kinds of failure


def rust_kinds() -> list[str]:
    code = rust_code(read("crates/engine/src/error.rs"), keep_texts=True)
    kinds = re.findall(r'\bKind::(\w+) => "(\w+)",', code)
    assert kinds
    assert all(variant == name for variant, name in kinds), kinds
    return [name for _, name in kinds]


def exception_classes(tree: ast.Module) -> set[str]:
    """Exceptions that a module defines or takes from `_native`."""
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id == "Error" for b in node.bases)
    }
    taken = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("_native")
        for alias in node.names
    }
    return (defined | taken) - {"Error"}


@pytest.mark.parametrize("name", ["python/shardfast/errors.py", "python/shardfast/_native.pyi"])
def test_kinds_of_failure_are_the_same_in_both_languages(name):
    assert exception_classes(ast.parse(read(name))) == set(rust_kinds()), (
        f"Remedy: {name} has one exception class for each kind of crates/engine/src/error.rs, and no other"
    )
