"""Nothing stands in the repository that no command reads: what is broken there would show nowhere."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path

from sources import ROOT

MODULE = re.compile(r'^[ \t]*(?:#\[path = "([^"]+)"\]\s*)?(?:pub(?:\([^)]*\))?\s+)?mod (\w+);', re.MULTILINE)
WHOLE = re.compile(r"^pytestmark = .*campaign", re.MULTILINE)
TEST = re.compile(r"^(?:async )?def test_", re.MULTILINE)

FOLDERS = (
    *("browser", "frameworks", "gpu", "kubernetes", "megatron", "mounted", "nfs", "python", "reader", "receivers"),
    *("structure", "wheel"),
)
RUN_BY = tuple(f"tests/{name}/" for name in FOLDERS)
"""Folders whose files `test_*.py` a step runs; tests/gpu needs a device."""

IGNORED = re.compile(r"^\s*#\[ignore", re.MULTILINE)
IGNORES = {
    "crates/store/tests/roles.rs",
    "crates/store/tests/servers.rs",
}
"""Files whose tests with `#[ignore]` a step of the campaigns runs."""


@cache
def tracked() -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in listed if (ROOT / path).is_file()]


def of_kind(ending: str) -> list[str]:
    return [path for path in tracked() if path.endswith(ending)]


@cache
def packages() -> list[dict]:
    manifests = ["Cargo.toml", *(path for path in of_kind("/Cargo.toml") if path.startswith("fuzz/"))]
    found = []
    for manifest in manifests:
        command = ["cargo", "metadata", "--no-deps", "--format-version=1", "--manifest-path", str(ROOT / manifest)]
        found += json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["packages"]
    return found


def below(source: Path, *, is_root: bool) -> list[Path]:
    """The file and the modules that it declares, theirs too."""
    if not source.is_file():
        return []
    inside = source.parent if is_root or source.name == "mod.rs" else source.parent / source.stem
    found = [source]
    for place, name in MODULE.findall(source.read_text(encoding="utf-8")):
        candidates = [source.parent / place] if place else [inside / f"{name}.rs", inside / name / "mod.rs"]
        for candidate in candidates:
            found += below(candidate.resolve(), is_root=bool(place))
    return found


def test_every_crate_is_built_by_a_step():
    known = {str(Path(package["manifest_path"]).relative_to(ROOT)) for package in packages()}
    crates = {path for path in of_kind("Cargo.toml") if "[package]" in (ROOT / path).read_text(encoding="utf-8")}
    assert crates - known == set()


def test_every_file_of_rust_is_a_part_of_a_crate():
    roots = [Path(target["src_path"]) for package in packages() for target in package["targets"]]
    reached = {str(file.relative_to(ROOT)) for root in roots for file in below(root, is_root=True)}
    assert set(of_kind(".rs")) - reached == set(), "no `mod` leads there"


def test_every_test_is_run_by_a_step():
    odd = []
    for path in of_kind(".py"):
        is_run = Path(path).name.startswith("test_") and path.startswith(RUN_BY)
        if not is_run and TEST.search((ROOT / path).read_text(encoding="utf-8")):
            odd.append(path)
    assert odd == [], "tests in files that no step collects"


def test_no_file_of_tests_leaves_the_gate_unseen():
    of_campaigns = [
        path for path in of_kind(".py") if path.startswith("tests/") and WHOLE.search((ROOT / path).read_text("utf-8"))
    ]
    assert of_campaigns == [], "a whole file: mark the tests that are further instances"
    ignores = {path for path in of_kind(".rs") if IGNORED.search((ROOT / path).read_text(encoding="utf-8"))}
    assert ignores - IGNORES == set(), "no step runs a test that is ignored, except those of these files"


def test_scripts_can_be_read_by_their_shell():
    scripts = [*of_kind(".sh"), ".ci/run"]
    for script in scripts:
        subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def test_every_fence_of_the_guide_is_understood():
    """Code in a fence that the tests do not know is shown and never run."""
    odd = []
    pages = [path for path in of_kind(".md") if path == "README.md" or path.startswith("docs/guide/")]
    for page in pages:
        for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
            if re.match(r"^\s*(```|~~~)", line) and not re.fullmatch(r"```(\w*|\{[\w-]+\}.*)", line):
                odd.append(f"{page}:{number}: {line}")
    assert odd == []
