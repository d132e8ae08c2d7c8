"""What `make test` leaves out: more seeds and kills, second instances of a case, servers and builds that take long.

It takes two hours on two cores. Run it before a release, and after a change to what a step attacks. Words choose the
steps whose names contain one of them: `python3 scripts/campaigns.py chance`. `fuzz/Cargo.toml` tells how to fuzz the
decoders by coverage.
"""

import sys

from steps import Step, main

BIN = ".venv/bin"


def given(variables: dict[str, int], *command: str) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *command]


def nextest(variables: dict[str, int], *arguments: str) -> list[str]:
    return given(variables, f"{BIN}/cargo-nextest", "nextest", "run", "--locked", "--cargo-quiet", *arguments)


def engine(variables: dict[str, int], *arguments: str) -> list[str]:
    """Tests of the engine with so many seeds, in one process."""
    return given(variables, "cargo", "test", "--locked", "--quiet", "--package", "shardfast-engine", *arguments)


def simulated(*arguments: str) -> list[str]:
    return ["cargo", "run", "--locked", "--quiet", "--package", "shardfast-sim", "--", *arguments]


def pytest(*arguments: str) -> list[str]:
    return [f"{BIN}/pytest", "--quiet", *arguments]


SERVERS = "object-storage servers"

STEPS = [
    Step(SERVERS, ["scripts/servers.sh", "install"]),
    # These take long, and one processor each.
    Step(
        "kills in windows",
        # A test that takes half an hour by design.
        given(
            {"SHARDFAST_AHEAD_KILLS": 200}, *pytest("-o", "faulthandler_timeout=0", "tests/python/test_ahead_kills.py")
        ),
    ),
    Step("stored values", [f"{BIN}/python", "fuzz/values.py", "--seconds", "600", "--start", "1000000"]),
    Step("oldest PyTorch", ["scripts/oldest.sh"]),
    Step("trainers' packages", ["scripts/frameworks.sh"]),
    Step("memory that Python owns", ["scripts/memcheck.sh"]),
    Step("wheels for each machine", ["scripts/wheel.sh"]),
    Step("Python tests, further instances", pytest("-m", "campaign", "tests/python")),
    Step(
        "replay over a thousand steps", given({"SHARDFAST_REPLAY_STEPS": 1000}, *pytest("tests/python/test_replay.py"))
    ),
    # These take all processors.
    Step("jobs on a disk", simulated("--seeds", "0..10000"), cores=1.5),
    Step("jobs at a service of objects", simulated("--seeds", "0..2500", "--storage", "objects"), cores=1.5),
    Step("faults at any request", engine({"SHARDFAST_FAR_SEEDS": 500}, "--test", "far", "seeded"), cores=1.5),
    Step(
        "a server that is killed",
        engine({"SHARDFAST_TEST_CRASHES": 50}, "--test", "far", "outlives"),
        after=(SERVERS,),
    ),
    Step("sweeps beside savers", engine({"SHARDFAST_SWEEP_SEEDS": 1000}, "--test", "checkpoint", "sweep::"), cores=1.5),
    Step("changes in windows", engine({"SHARDFAST_AHEAD_SEEDS": 500}, "--lib", "ahead::"), cores=1.5),
    # What fails by chance; it brings its own load.
    Step("chance", ["python3", "scripts/chance.py"], after=("oldest PyTorch",), cores=2),
]

if __name__ == "__main__":
    words = sys.argv[1:]
    chosen = [step for step in STEPS if not words or any(word in step.name for word in words)]
    names = {step.name for step in chosen}
    main([step._replace(after=tuple(name for name in step.after if name in names)) for step in chosen])
