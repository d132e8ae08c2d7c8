"""Everything that CI runs: the steps, in the order in which they begin where processors are short.

Words choose the steps whose names contain one of them, once the others have run: `python3 scripts/test.py clippy mypy`.
"""

import os
import shutil
import sys

from steps import ROOT, Step, main

# A build of everything is a tenth shorter without; what a person builds while working lies beside it.
os.environ.setdefault("CARGO_INCREMENTAL", "0")

# What a person's shell may hold, and what would change which tests run, or against what.
for _name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTHONPATH", "PYTHONOPTIMIZE", "PYTHONSAFEPATH", "PYTHONHOME"):
    os.environ.pop(_name, None)

BIN = ".venv/bin"

NOT_IN_PYTEST = ("structure", "wheel", "frameworks", "megatron", "nfs", "python/test_readme.py", "python/test_guide.py")
"""Parts of tests/ that steps of their own run."""


def shell(command: str) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", command]


# A file's tests run in one process, in their order: what they share is made once, and a failure comes again.
BESIDE = ("--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder")


# Many tests in Rust wait for a server or a deadline: one more of them than processors keeps these busy.
MORE = (os.cpu_count() or 1) + 1


def cargo(verb: str, *arguments: str) -> list[str]:
    return ["cargo", verb, "--locked", "--quiet", *arguments]


def pytest(*arguments: str) -> list[str]:
    """What runs for every change, not what the campaigns add."""
    return [f"{BIN}/pytest", "--quiet", "-m", "not campaign", *arguments]


def nextest(which: str) -> list[str]:
    """Tests of some packages, built as those of the workspace are."""
    more = ("--workspace", "--locked", "--cargo-quiet", f"--test-threads={MORE}")
    return [f"{BIN}/cargo-nextest", "nextest", "run", *more, f"--filterset={which}"]


# Two steps of a few minutes: a person who repeats one waits less.
FIRST = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "python").glob("test_[a-l]*.py"))
FIRST = [name for name in FIRST if name.removeprefix("tests/") not in NOT_IN_PYTEST]
OTHERS = [f"--ignore={name}" for name in (*FIRST, *(f"tests/{part}" for part in NOT_IN_PYTEST))]

AFTER_BUILDS = ("object-storage servers", "wheel", "Rust tests, built")

# As a user would: away from the checkout and its configuration, against what is installed.
STUBS = shell('bin=$PWD/.venv/bin; cd /; "$bin/stubtest" shardfast._native')
USER_TYPES = shell(
    'here=$PWD; cd /; "$here/.venv/bin/mypy" --strict --config-file= --cache-dir="$here/.mypy_cache/user" '
    '"$here/tests/python/typing/user_script.py"'
)

# Tests skip a server that a person's machine cannot have (Go, Node or Maven are missing); in CI they fail.
SERVERS = (
    "scripts/servers.sh install versitygw moto s3rver azurite hdfs || { [[ ! ${CI-} ]] && "
    "echo 'tests that need the servers above will be skipped'; }"
)

# What others wait for.
MADE = [
    Step("object-storage servers", shell(SERVERS)),
    Step("environment", ["scripts/setup.sh", "environment"]),
    Step("wheel", ["scripts/setup.sh"], after=("environment",), cores=1.2),
    Step("Rust tests, built", cargo("test", "--workspace", "--no-run"), cores=1.2),
]

CHECKED = [
    Step("pytest, a to l", pytest(*BESIDE, *FIRST), after=AFTER_BUILDS, cores=1.5),
    Step("cargo test, engine", nextest("package(shardfast-engine)"), after=AFTER_BUILDS),
    Step("pytest, m to z", pytest(*BESIDE, "tests", *OTHERS), after=AFTER_BUILDS, cores=1.5),
    Step("cargo test, other crates", nextest("not package(shardfast-engine)"), after=AFTER_BUILDS),
    Step("pytest, oldest PyTorch", ["scripts/oldest.sh", "gate"], after=("wheel",)),
    Step("pytest, trainers' packages", ["scripts/frameworks.sh", "gate"], after=("wheel",)),
    Step("pytest, Megatron-Core", ["scripts/megatron.sh", "gate"], after=("wheel",)),
    Step(
        "clippy", cargo("clippy", "--workspace", "--all-targets", "--", "-D", "warnings"), after=("Rust tests, built",)
    ),
    Step("README and guide", pytest("tests/python/test_readme.py", "tests/python/test_guide.py"), after=("wheel",)),
    Step("NFS, two clients", ["scripts/guests.sh", "gate"], after=("wheel",), cores=1.5),
    Step("wheel, audited and tried", pytest("tests/wheel"), after=("wheel",)),
    Step("guide as a site", ["scripts/site.sh", "gate"], after=("wheel",)),
    Step("cargo doc", ["scripts/docs.sh", "rust"], after=("clippy",)),
    Step("documentation's examples in Rust", cargo("test", "--workspace", "--doc"), after=("Rust tests, built",)),
    Step("structure", pytest("tests/structure"), after=("environment",)),
    Step("mypy", [f"{BIN}/mypy"], after=("environment",)),
    Step("mypy, a user's script", USER_TYPES, after=("wheel",)),
    Step("stubs", STUBS, after=("wheel",)),
    Step("rustfmt", shell("cargo fmt --all --check; cargo fmt --manifest-path fuzz/Cargo.toml --check")),
    Step("ruff check", [f"{BIN}/ruff", "check", "."], after=("environment",)),
    Step("ruff format", [f"{BIN}/ruff", "format", "--check", "."], after=("environment",)),
]

GIB = 1 << 30


def check_room() -> None:
    """A disk that fills up in the middle fails one step after another, each with a message of its own."""
    needed = 8 * GIB if (ROOT / "target" / "debug").exists() else 30 * GIB
    free = shutil.disk_usage(ROOT).free
    if free < needed:
        sys.exit(
            f"make test: {ROOT} has {free / GIB:.1f} GiB free, expected {needed / GIB:.0f} GiB for what is built and "
            "for the tests' checkpoints: `make clean` removes what is built here, and /tmp/pytest-of-* is old tests'"
        )


if __name__ == "__main__":
    check_room()
    main([*MADE, *CHECKED])
