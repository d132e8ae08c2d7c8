"""One version, reasoned dependencies, permitted licences, links that lead somewhere, words that run what they say."""

import ast
import fnmatch
import hashlib
import os
import re
import tomllib

import pytest
from sources import ROOT, cargo_metadata, files, offenders, read, table

APACHE_2_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def toml(name: str) -> dict:
    return tomllib.loads(read(name))


# Versions


def test_one_version():
    version = toml("Cargo.toml")["workspace"]["package"]["version"]
    found = [
        f"crates/{package['name']}: {package['version']}"
        for package in cargo_metadata("--no-deps", "--offline")["packages"]
        if package["version"] != version
    ]
    offenders(f"write `version.workspace = true`: everything is {version}", found)
    project = toml("pyproject.toml")["project"]
    assert project["dynamic"] == ["version"], "Remedy: the wheel takes its version from Cargo.toml (dynamic)"
    assert "version" not in project, "Remedy: the wheel takes its version from Cargo.toml (dynamic)"
    newest = re.search(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)
    assert newest is not None, "CHANGELOG.md has no `## <version>` section"
    assert newest[1] == version, f"CHANGELOG.md begins with {newest[1]}. Remedy: open a section for {version}"


def test_the_toolchain_is_the_declared_one():
    channel = toml("rust-toolchain.toml")["toolchain"]["channel"]
    declared = toml("Cargo.toml")["workspace"]["package"]["rust-version"]
    assert channel.startswith(declared), f"rust-toolchain.toml pins {channel}, Cargo.toml declares {declared}"


@pytest.mark.parametrize("name", ["dev", "bench", "browser", "frameworks", "megatron", "oldest"])
def test_lock_files_are_there_and_pin(name):
    wanted = re.findall(r"^([\w-]+==[\w.]+)", read(f"requirements/{name}.in"), re.MULTILINE)
    pinned = read(f"requirements/{name}.txt").splitlines()
    offenders("run scripts/lock.sh", [pin for pin in wanted if not any(line.startswith(pin) for line in pinned)])
    loose = [line for line in pinned if line.strip() and not line.startswith("#") and not re.match(r"[\w.-]+==", line)]
    offenders("run scripts/lock.sh: the lock file holds pinned names and nothing else", loose)
    assert "Cargo.lock" in files(".lock"), "Remedy: commit Cargo.lock"


@pytest.mark.parametrize("name", ["bench", "browser", "frameworks", "megatron"])
def test_what_is_measured_is_made_of_what_is_tested(name):
    tested = read("requirements/dev.txt").splitlines()
    names = {line.split("==")[0] for line in tested if "==" in line}
    others = read(f"requirements/{name}.txt").splitlines()
    found = [line for line in others if line.split("==")[0] in names and line not in tested]
    offenders("run scripts/lock.sh: where both lock files name a package they pin one version", found)


def test_the_versions_of_torch_are_those_that_are_tested():
    oldest, newest = ast.literal_eval(re.search(r"^TESTED = (.*)$", read(TORCH_ADAPTER), re.MULTILINE)[1])
    pins = {name: re.search(r"^torch==(.*)$", read(f"requirements/{name}.in"), re.MULTILINE)[1] for name in PINNED}
    assert pins["oldest"] == oldest, f"requirements/oldest.in pins {pins['oldest']}, {TORCH_ADAPTER} says {oldest}"
    assert f"{pins['dev']}.".startswith(f"{newest}."), f"requirements/dev.in pins {pins['dev']}, not {newest}"
    extra = toml("pyproject.toml")["project"]["optional-dependencies"]["torch"]
    assert extra == [f"torch>={oldest}"], f"pyproject.toml asks for {extra}"
    said = f"PyTorch {oldest} to {newest}"
    found = [
        page for page in ("README.md", "docs/guide/quick-start.md", "docs/guide/limits.md") if said not in read(page)
    ]
    offenders(f"say {said!r}", found)


PINNED = ("oldest", "dev")
TORCH_ADAPTER = "python/shardfast/adapters/torch/__init__.py"


def test_build_tools_are_pinned_once():
    (maturin,) = toml("pyproject.toml")["build-system"]["requires"]
    assert maturin in read("requirements/dev.in").splitlines(), f"requirements/dev.in pins another one than {maturin}"


# Dependencies


def test_every_dependency_has_a_reason():
    lines = read("Cargo.toml").splitlines()
    start = lines.index("[workspace.dependencies]") + 1
    reason, found = "", []
    for number, line in enumerate(lines[start:], start + 1):
        if line.startswith("["):
            break
        if line.startswith("#"):
            reason = line
        elif not line.strip():
            reason = ""
        elif not reason and "path =" not in line:
            found.append(f"Cargo.toml:{number}: {line}")
    offenders("say in a comment above the dependency why it is worth having", found)


def test_crates_take_dependencies_from_the_workspace():
    found = []
    for name in files("Cargo.toml"):
        if name.startswith("crates/"):
            for kind in ("dependencies", "dev-dependencies", "build-dependencies"):
                found += [
                    f"{name}: {dependency}"
                    for dependency, entry in toml(name).get(kind, {}).items()
                    if not (isinstance(entry, dict) and (entry.get("workspace") is True or "path" in entry))
                ]
    offenders("write `<name>.workspace = true` and put the version, with its reason, into the root Cargo.toml", found)


def linked_packages() -> list[dict]:
    """Every package that the wheel is made of, ours and those of build scripts included, on deny.toml's targets."""
    linked = {}
    for target in toml("deny.toml")["graph"]["targets"]:
        metadata = cargo_metadata("--locked", "--filter-platform", target)
        packages = {package["id"]: package for package in metadata["packages"]}
        uses = {
            node["id"]: [
                dependency["pkg"]
                for dependency in node["deps"]
                if any(kind["kind"] != "dev" for kind in dependency["dep_kinds"])
            ]
            for node in metadata["resolve"]["nodes"]
        }
        left = list(metadata["workspace_members"])
        while left:
            package = left.pop()
            if package not in linked:
                linked[package] = packages[package]
                left += uses[package]
    return list(linked.values())


def is_permitted(expression: str, allowed: set[str]) -> bool:
    """Whether the SPDX expression can be satisfied with allowed licences (`/` is an old way to write OR)."""
    tokens = re.findall(r"[()]|[\w.+-]+(?: WITH [\w.-]+)?", expression.replace("/", " OR "))

    def term() -> bool:
        token = tokens.pop(0)
        if token == "(":
            value = either()
            assert tokens.pop(0) == ")", expression
            return value
        return token in allowed

    def every() -> bool:
        value = term()
        while tokens and tokens[0] == "AND":
            tokens.pop(0)
            value = term() and value
        return value

    def either() -> bool:
        value = every()
        while tokens and tokens[0] == "OR":
            tokens.pop(0)
            value = every() or value
        return value

    value = either()
    assert not tokens, expression
    return value


def test_licence_expressions_are_understood():
    allowed = {"MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"}
    permitted = [
        "MIT",
        "MIT/Apache-2.0",
        "GPL-3.0 OR MIT",
        "(MIT OR GPL-3.0) AND Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
    ]
    refused = ["GPL-3.0", "MIT AND GPL-3.0", "(MIT OR Apache-2.0) AND Unicode-3.0", "GPL-3.0 WITH LLVM-exception"]
    assert [is_permitted(expression, allowed) for expression in permitted] == [True] * len(permitted)
    assert [is_permitted(expression, allowed) for expression in refused] == [False] * len(refused)


def test_licences_are_permitted():
    allowed = set(toml("deny.toml")["licenses"]["allow"])
    found = [
        f"{package['name']} {package['version']}: {package['license']}"
        for package in linked_packages()
        if not is_permitted(package["license"] or "none declared", allowed)
    ]
    offenders("replace the crate; a permissive licence that is new here goes into deny.toml", found)


def test_sources_are_the_registry_and_this_checkout():
    found = [
        f"{package['name']} {package['version']}: {package['source']}"
        for package in linked_packages()
        if package["source"] not in (None, "registry+https://github.com/rust-lang/crates.io-index")
    ]
    offenders("take the crate from crates.io", found)


def test_no_banned_crate_and_no_crate_twice():
    bans = toml("deny.toml")["bans"]
    versions: dict[str, set[str]] = {}
    for package in linked_packages():
        versions.setdefault(package["name"], set()).add(package["version"])
    banned = [f"{ban['crate']}: {ban['reason']}" for ban in bans["deny"] if ban["crate"] in versions]
    offenders("use another crate", banned)
    skipped = {}
    for skip in bans["skip"]:
        name, prefix = skip["crate"].split("@")
        skipped[skip["crate"]] = {v for v in versions.get(name, ()) if f"{v}.".startswith(f"{prefix}.")}
    stale = [crate for crate, matching in skipped.items() if not matching]
    offenders("remove the entry from `skip` in deny.toml: nothing matches it", stale)
    accepted = {
        name: set().union(*(m for crate, m in skipped.items() if crate.split("@")[0] == name)) for name in versions
    }
    twice = [f"{name}: {sorted(found)}" for name, found in versions.items() if len(found - accepted[name]) > 1]
    offenders("bring the crates to one version, or add the older one to `skip` in deny.toml with its reason", twice)


# Documents


def headings(markdown: str) -> set[str]:
    """The anchors of a page as GitHub makes them."""
    plain = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    titles = re.findall(r"^#+\s+(.*)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", files(".md"))
def test_links_lead_somewhere(page):
    found = []
    text = re.sub(r"```.*?```|`[^`\n]*`", "", read(page), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        if not (ROOT / other).exists():
            found.append(f"{page}: {target}: no such file")
        elif anchor and anchor not in headings(read(other)):
            found.append(f"{page}: {target}: no such heading")
    offenders("mend the link", found)


def test_pages_named_in_sources_exist():
    found = [
        f"{name}: {page}"
        for name in files(".rs", ".py", ".pyi", ".sh", ".toml")
        for page in re.findall(r"\bdocs/[\w./-]+\.md\b", read(name))
        if not (ROOT / page).is_file()
    ]
    offenders("mend the name of the page", found)


def test_decisions_are_numbered_and_listed():
    records = [os.path.basename(name) for name in files(".md") if re.match(r"docs/decisions/\d", name)]
    assert [int(name[:3]) for name in records] == list(range(1, len(records) + 1)), f"numbers with holes: {records}"
    listed = re.findall(r"\]\((\d[\w-]+\.md)\)", read("docs/decisions/README.md"))
    assert listed == records, "Remedy: list every record, in order, in docs/decisions/README.md"
    for record in records:
        text = read(f"docs/decisions/{record}")
        parts = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert parts == ["Context", "Decision", "Consequences", "What would change our mind"], f"{record}: {parts}"
        assert text.count("\n") <= 60, f"{record} is longer than a page"


def test_the_licence_is_whole():
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2_SHA256
    assert toml("Cargo.toml")["workspace"]["package"]["license"] == "Apache-2.0"
    assert toml("pyproject.toml")["project"]["license"] == "Apache-2.0"


# Words


def test_ci_runs_the_word_that_a_person_runs():
    commands = [line for line in read(".ci/run").splitlines() if re.search(r"\b(?:make|cargo|python|pytest)\b", line)]
    ran = [line for line in commands if not re.match(r"\s*(?:#|echo)", line)]
    assert ran == ["if make test; then"], "Remedy: a check belongs into scripts/test.py, where everybody runs it"


def test_the_menu_is_whole():
    makefile = read("Makefile")
    targets = re.findall(r"^([\w-]+):", makefile, re.MULTILINE)
    menu = re.search(r'echo "make ([\w| -]+?)  ', makefile)
    assert menu is not None
    assert ["menu", *menu[1].replace("|", " ").split()] == targets


def test_scripts_are_strict_and_executable():
    scripts = [name for name in (*files(".sh"), ".ci/run") if name.startswith(("scripts/", ".ci/"))]
    assert fnmatch.filter(scripts, "scripts/*.sh")
    found = [f"{name}: not executable" for name in scripts if not os.access(ROOT / name, os.X_OK)]
    found += [f"{name}: no `set -euo pipefail`" for name in scripts if "\nset -euo pipefail\n" not in read(name)]
    found += [f"{name}: no bash" for name in scripts if not read(name).startswith("#!/usr/bin/env bash\n")]
    offenders("begin a script like the others and chmod +x it", found)


def test_guarantees_name_their_tests():
    guarantees = table(read("README.md"), "guarantee", "the test that fails without it")
    found = [
        row["guarantee"]
        for row in guarantees
        if not re.search(r"\]\([\w./-]+\)", row["the test that fails without it"])
    ]
    offenders("link the test that proves it, or do not promise it", found)
