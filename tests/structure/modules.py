"""Which modules of a crate use which others, as `crate::`, `super::` and `self::` paths outside of unit tests say."""

import re
from pathlib import PurePosixPath

from sources import block_end, files, read, rust_code, without_unit_tests

_USE = re.compile(r"\b(?:pub(?:\([^)]*\))?\s+)?use\s+([^;]+);")
_PATH = re.compile(r"\b(crate|super|self)((?:::\w+)+)")


def module_of(file: str, source: str) -> tuple[str, ...]:
    """The path of the module in a file of the folder `source`: `()` for the crate itself."""
    path = PurePosixPath(file).relative_to(source).with_suffix("")
    parts = path.parts
    return () if parts in (("lib",), ("main",)) else parts


def _expanded(tree: str) -> list[str]:
    """The paths of a use tree: `a::{b, c::d}` is `a::b` and `a::c::d`."""
    start = tree.find("{")
    if start < 0:
        return [re.sub(r"\s+as\s+\w+", "", tree).strip()]
    prefix, inner = tree[:start], tree[start + 1 : block_end(tree, start) - 1]
    parts, depth, part = [], 0, ""
    for letter in inner:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += letter
    parts.append(part)
    return [prefix.strip() + path for part in parts if part.strip() for path in _expanded(part.strip())]


def _absolute(path: str, module: tuple[str, ...]) -> tuple[str, ...] | None:
    """A path from the crate's root on, as far as it begins with `crate`, `super` or `self`."""
    first, *rest = path.replace(" ", "").split("::")
    if first == "crate":
        return tuple(rest)
    if first == "self":
        return (*module, *rest)
    if first == "super":
        base = module[:-1]
        while rest and rest[0] == "super":
            base, rest = base[:-1], rest[1:]
        return (*base, *rest)
    return None


def uses(source: str) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """For each module of a crate's folder `source` the others that it uses.

    What a path names in the crate's root counts for the module that the root takes it from.
    """
    codes: dict[tuple[str, ...], str] = {}
    for name in files(".rs"):
        if name.startswith(f"{source}/") and not _is_test(name):
            # Where there is a `main.rs` beside `lib.rs`, both are the root.
            module = module_of(name, source)
            codes[module] = codes.get(module, "") + without_unit_tests(rust_code(read(name)))
    exported: dict[str, tuple[str, ...]] = {}
    for tree in _USE.findall(codes.get((), "")):
        for path in _expanded(tree):
            parts = tuple(path.replace(" ", "").split("::"))
            for length in range(len(parts) - 1, 0, -1):
                if parts[:length] in codes:
                    exported[parts[-1]] = parts[:length]
                    break
    found: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for module, code in codes.items():
        paths = [path for tree in _USE.findall(code) for path in _expanded(tree)]
        paths += [match[0] for match in _PATH.finditer(_USE.sub("", code))]
        local = {child[-1] for child in codes if child and child[:-1] == module}
        used = set()
        for path in paths:
            first = path.split("::")[0].strip()
            target = (*module, *path.replace(" ", "").split("::")) if first in local else _absolute(path, module)
            if target is None:
                continue
            if len(target) == 1 and target[0] in exported and target not in codes:
                target = (*exported[target[0]], *target)
            while target and target not in codes:
                target = target[:-1]
            used.add(target)
        # A folder is one room with its file: what a module takes from those above it is no arrow.
        found[module] = {other for other in used if other != module[: len(other)]}
    return found


def _is_test(name: str) -> bool:
    return PurePosixPath(name).stem in ("tests", "scenarios") or "/tests/" in name


def circles(arrows: dict[tuple[str, ...], set[tuple[str, ...]]]) -> list[list[str]]:
    """Groups of modules of which each uses each other one, directly or not (Tarjan's strongly connected components)."""
    index: dict[tuple[str, ...], int] = {}
    low: dict[tuple[str, ...], int] = {}
    stack: list[tuple[str, ...]] = []
    groups: list[list[str]] = []

    def visit(node: tuple[str, ...]) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in arrows.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = []
            while True:
                member = stack.pop()
                group.append("::".join(member))
                if member == node:
                    break
            if len(group) > 1:
                groups.append(sorted(group))

    for node in arrows:
        if node not in index:
            visit(node)
    return groups
