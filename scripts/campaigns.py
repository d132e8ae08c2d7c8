"""What `make test` leaves out: more seeds and kills, second instances of a case, servers and builds that take long.

It takes hours on two cores. Run it before a release, and after a change to what a step attacks. Words choose the
steps whose names contain one of them: `python3 scripts/campaigns.py chance`. `fuzz/Cargo.toml` tells how to fuzz the
decoders by coverage.
"""

from steps import Step, main

BIN = ".venv/bin"


def given(variables: dict[str, object], *command: str) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *command]


def nextest(variables: dict[str, object], *arguments: str) -> list[str]:
    """Tests in Rust with these numbers. Of the whole workspace: for a part of it cargo compiles dependencies anew."""
    command = [f"{BIN}/cargo-nextest", "nextest", "run", "--workspace", "--locked", "--cargo-quiet"]
    return given(variables, *command, "--profile", "campaigns", *arguments)


def simulated(*arguments: str) -> list[str]:
    return ["cargo", "run", "--locked", "--quiet", "--package", "shardfast-sim", "--", *arguments]


def pytest(*arguments: str) -> list[str]:
    return [f"{BIN}/pytest", "--quiet", *arguments]


SERVERS = "object-storage servers"

# What `make test` cuts to a third or less, in Python and in Rust.
LAID_OUT = ("fsdp", "losses", "optimizers", "pipelines")
LAYOUTS = {"SHARDFAST_PAIRS_ONE_IN": 1, "SHARDFAST_LOSS_STEPS": 20}
FULL = {
    "SHARDFAST_SIM_TIMES": 5,
    "SHARDFAST_FAULTS_ONE_IN": 1,
    "SHARDFAST_DAMAGE_ONE_IN": 1,
    "SHARDFAST_TEST_KILLS": 200,
    "SHARDFAST_CALLS_ONE_IN": 1,
    "SHARDFAST_TEST_PAIRS": 320,
    "SHARDFAST_PLAN_CASES": 10000,
    "SHARDFAST_AHEAD_SEEDS": 60,
    "SHARDFAST_DEVICE_SEEDS": 18,
    "SHARDFAST_DIGESTS_ONE_IN": 1,
}
SHORTENED = """
binary(smoke) | test(/^(damage::bytes_all|kill::kills|crash::a_system|reshard::|ahead::|digest::digests_of)/)
| package(shardfast-multistep)
| test(what_is_saved_under) | test(what_is_committed) | test(each_request_of)
"""

# What runs on versitygw in `make test`, and what is about MinIO itself.
ON_MINIO = {
    "SHARDFAST_TEST_S3": "minio",
    "SHARDFAST_FAULTS_ONE_IN": 1,
    "SHARDFAST_TEST_CRASHES": 8,
    "SHARDFAST_FAR_SEEDS": 64,
}
ON_A_SERVER = "binary(far) | binary(gcs) | binary(servers) & test(/^minio/) | test(minio_gives)"

# The last ones of minor versions before the one that requirements/megatron.in names.
OLDER_MEGATRON = ("0.15.3", "0.17.1", "0.18.2")

# Likewise, before that of scripts/frameworks.sh; and of trainers the oldest that work.
OLDER = (
    ("deepspeed==0.16.9",),
    ("deepspeed==0.17.6",),
    ("accelerate==1.13.0",),
    ("transformers==5.10.0", "tokenizers==0.22.2"),
    ("lightning==2.6.0",),
)

# Data loaders that requirements/frameworks.in leaves out, each with what it imports.
LOADERS = (
    ("grain==0.2.18", "array-record==0.8.6", "cloudpickle==3.1.3", "etils==1.15.0", "portpicker==1.6.0"),
    (
        "megatron-energon==7.4.1",
        *("braceexpand==0.1.7", "bracex==3.2.3", "cffi==2.1.1", "deprecation==2.1.0", "filetype==1.2.0"),
        *("jsonschema==4.26.0", "jsonschema-specifications==2025.9.1", "lark==1.3.1", "multi-storage-client==1.3.1"),
        *("opentelemetry-api==1.45.2", "rapidyaml==0.15.2", "referencing==0.37.0", "rpds-py==2026.9.1"),
        *("wcmatch==12.0.1", "webdataset==1.0.2", "xattr==1.3.0"),
    ),
)

LOCAL = "tests/python/test_local.py"
MEMORY = ("tests/python/test_memory.py", "tests/python/test_memory_ends.py")
MACHINES = "tests/python/test_memory_machines.py"

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
    Step(
        "optimizers made at random",
        given(
            {"SHARDFAST_GENERATED_OPTIMIZERS": 20000},
            *pytest("-o", "faulthandler_timeout=0", "tests/python/test_generated_optimizers.py"),
        ),
    ),
    Step(
        "every optimizer in every layout",
        given(
            {"SHARDFAST_OPTIMIZERS_ONE_IN": 1},
            *pytest("-o", "faulthandler_timeout=0", "tests/python/test_optimizer_table.py"),
        ),
    ),
    Step("nodes of HDFS that die", given({"SHARDFAST_HDFS_KILLS": 1}, *pytest("tests/python/test_hdfs.py"))),
    # Tests that take half an hour by design.
    Step(
        "nodes of HDFS that die at many moments",
        given(
            {"SHARDFAST_HDFS_MOMENTS": 30, "SHARDFAST_HDFS_SAVERS": 200},
            *pytest("-o", "faulthandler_timeout=0", "tests/python/test_hdfs_kills.py"),
        ),
    ),
    Step(
        "active NameNodes that die",
        given(
            {"SHARDFAST_HDFS_FAILOVERS": 20}, *pytest("-o", "faulthandler_timeout=0", "tests/python/test_hdfs_ha.py")
        ),
    ),
    Step(
        "HDFS with Kerberos, and encryption zones",
        given({"SHARDFAST_HDFS_SECURED": 1}, *pytest("tests/python/test_hdfs_secured.py")),
    ),
    Step(
        "calls of HDFS that are spoiled",
        given({"SHARDFAST_HDFS_FAULTS_ONE_IN": 1}, *pytest("tests/python/test_hdfs_faults.py")),
    ),
    Step(
        "jobs of Slurm that end at many moments",
        given({"SHARDFAST_SLURM_MOMENTS": 20}, *pytest("-o", "faulthandler_timeout=0", "tests/python/test_slurm.py")),
    ),
    # Two minutes for each.
    Step(
        "machines of elastic torchrun that go and come back",
        given(
            {"SHARDFAST_ELASTIC_MOMENTS": 30}, *pytest("-o", "faulthandler_timeout=0", "tests/python/test_elastic.py")
        ),
    ),
    Step("trainings told to stop", given({"SHARDFAST_STOP_SEEDS": 60}, *pytest("tests/python/test_stopping.py"))),
    Step("reports of killed jobs", given({"SHARDFAST_REPORT_KILLS": 100}, *pytest("tests/python/test_report.py"))),
    Step(
        "faults that reports must find",
        given(
            {"SHARDFAST_FAULT_SEEDS": 20, "SHARDFAST_HEALTHY_RUNS": 200}, *pytest("tests/python/test_faults_found.py")
        ),
        cores=2,
    ),
    Step("units of work", given({"SHARDFAST_UNIT_HISTORIES": 10000}, *pytest("tests/python/test_units.py"))),
    Step("stored values", [f"{BIN}/python", "fuzz/values.py", "--seconds", "600", "--start", "1000000"]),
    Step("oldest PyTorch", given(LAYOUTS, "scripts/oldest.sh")),
    Step("trainers' packages", ["scripts/frameworks.sh"]),
    *(Step(f"trainers' packages, {of[0]}", ["scripts/frameworks.sh", "with", *of]) for of in (*OLDER, *LOADERS)),
    Step("manifests for Kubernetes", ["scripts/kubernetes.sh"]),
    Step("receivers of metrics and traces", ["scripts/receivers.sh"]),
    Step("mounted file systems", ["scripts/mounted.sh"], after=(SERVERS,)),
    Step(
        "NFS, two clients",
        given({"SHARDFAST_NFS_MOMENTS": 6}, "scripts/guests.sh", "-o", "faulthandler_timeout=0", "tests/nfs"),
        cores=1.5,
    ),
    Step("Megatron-Core", ["scripts/megatron.sh"]),
    *(Step(f"Megatron-Core {version}", ["scripts/megatron.sh", "with", version]) for version in OLDER_MEGATRON),
    Step("pages in a browser", ["scripts/browser.sh"]),
    Step("wheels for each machine", ["scripts/wheel.sh"]),
    Step("demo", [f"{BIN}/python", "examples/demo.py"]),
    Step("guide as a site, its whole figure", ["scripts/site.sh"]),
    Step(
        "copies that meet",
        given({"SHARDFAST_COPY_ROUNDS": 50}, *pytest("tests/python/test_copies.py")),
        after=(SERVERS,),
    ),
    Step("Python tests, further instances", pytest("-m", "campaign", "tests/python")),
    Step(
        "every layout into every other",
        given(LAYOUTS, *pytest(*(f"tests/python/test_{name}.py" for name in LAID_OUT))),
    ),
    Step(
        "replay over a thousand steps", given({"SHARDFAST_REPLAY_STEPS": 1000}, *pytest("tests/python/test_replay.py"))
    ),
    # These take all processors.
    Step("jobs on a disk", simulated("--seeds", "0..10000"), cores=1.5),
    Step("jobs at a service of objects", simulated("--seeds", "0..2500", "--storage", "objects"), cores=1.5),
    Step("Rust tests at their full numbers", nextest(FULL, "-E", SHORTENED), after=(SERVERS,), cores=1.5),
    Step("MinIO", nextest(ON_MINIO, "--run-ignored", "all", "-E", ON_A_SERVER), after=(SERVERS,), cores=1.5),
    Step(
        "Python tests on MinIO",
        given({"SHARDFAST_TEST_S3": "minio"}, *pytest("tests/python/test_object_stores.py")),
        after=(SERVERS,),
    ),
    Step("faults at any request", nextest({"SHARDFAST_FAR_SEEDS": 500}, "-E", "test(seeded_faults)"), cores=1.5),
    Step(
        "a server that is killed",
        nextest({"SHARDFAST_TEST_CRASHES": 50}, "-E", "test(outlives_the_death)"),
        after=(SERVERS,),
    ),
    Step(
        "histories of machines with local disks",
        nextest({"SHARDFAST_LEVELS_SEEDS": 10000}, "-E", "test(/^levels::/)"),
    ),
    Step(
        "trainings with local disks that are killed",
        # Tests that take a quarter of an hour by design.
        given({"SHARDFAST_LOCAL_KILLS": 150}, *pytest("-o", "faulthandler_timeout=0", LOCAL)),
        after=(SERVERS,),
    ),
    Step(
        "trainings with memory that are killed",
        given(
            {"SHARDFAST_MEMORY_KILLS": 100, "SHARDFAST_MEMORY_SIGNALS": 60},
            *pytest("-o", "faulthandler_timeout=0", *MEMORY),
        ),
    ),
    # Ten seconds for each.
    Step(
        "machines with memory that are lost at any moment",
        given({"SHARDFAST_MACHINE_KILLS": 200}, *pytest("-o", "faulthandler_timeout=0", MACHINES, "-k", "any_moment")),
    ),
    Step(
        "runs that are tended",
        nextest({"SHARDFAST_TENDING_SEEDS": 10000, "SHARDFAST_TENDING_FAR_SEEDS": 50}, "-E", "test(/^tending::/)"),
        after=(SERVERS,),
    ),
    Step("sweeps beside savers", nextest({"SHARDFAST_SWEEP_SEEDS": 1000}, "-E", "test(/^sweep::/)"), cores=1.5),
    Step(
        "changes in windows", nextest({"SHARDFAST_AHEAD_SEEDS": 500}, "-E", "package(shardfast-multistep)"), cores=1.5
    ),
    # What fails by chance; it brings its own load.
    Step("chance", ["python3", "scripts/chance.py"], after=("oldest PyTorch",), cores=2),
]

if __name__ == "__main__":
    main(STEPS)
