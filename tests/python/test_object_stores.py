"""Saves and loads over S3, with a real server: what works on a disk works there by changing one string."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import shardfast as sf
import torch
from layouts import build, differing, fill
from servers import running

SHARDFAST = Path(sys.executable).parent / "shardfast"


@pytest.fixture(scope="module")
def service():
    with running(os.environ.get("SHARDFAST_TEST_S3", "versitygw")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


def command(*arguments, code=0):
    done = subprocess.run([SHARDFAST, *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout


def save_known(rank, world, layout, url):
    model, optimizer = build(layout)
    fill(model, optimizer)
    sf.save(url, {"model": model, "optimizer": optimizer})


def expect_known(rank, world, layout, url):
    model, optimizer = build(layout, seed=1)
    sf.load(url, {"model": model, "optimizer": optimizer})
    assert differing(model, optimizer) == []


@pytest.mark.parametrize(("saved", "loaded"), [(("fsdp", 2), ("fsdp", 3)), (("fsdp_tp", 4), ("tp", 2))])
def test_what_some_ranks_saved_others_load(ranks, service, saved, loaded):
    url = service.s3(f"resharded/{saved[0]}")
    ranks(saved[1])(save_known, saved[0], url)
    ranks(loaded[1])(expect_known, loaded[0], url)
    assert "sound" in command("verify", url)


def train(url, total, state, model, optimizer):
    checkpointer = sf.Checkpointer(url, every=sf.steps(2), keep=sf.last(2))
    start = checkpointer.restore(state)
    losses = []
    for step in range(start, total):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        checkpointer.step(step + 1, state)
    checkpointer.close()
    return start, losses


def fresh():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 600), torch.nn.Tanh(), torch.nn.Linear(600, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, "extra": {"random": sf.random_state()}}, model, optimizer


def test_the_quick_start_works_by_changing_one_string(service, tmp_path):
    whole = train(f"{tmp_path}/run", 10, *fresh())
    url = service.s3("quick")
    first, second = train(url, 6, *fresh()), train(url, 10, *fresh())
    assert (whole[0], first[0], second[0]) == (0, 0, 6)
    assert whole[1] == first[1] + second[1]
    listed = json.loads(command("ls", "--json", url))["checkpoints"]
    committed = [line["step"] for line in listed if line["status"] == "committed"]
    assert committed == [8, 10], "the rule of retention; the files of a third one may still be leaving"


def test_the_command_and_the_verbs_work_there(service, tmp_path):
    state, model, _ = fresh()
    url, other = service.s3("verbs/one"), service.s3("verbs/two")
    sf.save(url, state)
    with torch.no_grad():
        model[0].bias += 1
    pending = sf.save_async(other, state)
    pending.committed()
    assert "0.weight" in command("inspect", url, "--leaf", "*weight")
    assert "model/0.bias" in command("diff", url, other, code=1)
    assert "sound" in command("verify", url)
    command("export", url, service.s3("verbs/exported"), "--key", "model")
    command("export", url, f"{tmp_path}/exported", "--key", "model")
    with pytest.raises(sf.Conflict, match="a checkpoint is committed there already"):
        sf.save(url, state)
    with sf.mapped(url) as checkpoint, pytest.raises(sf.Unsupported, match="cannot be mapped"):
        checkpoint["model/0.bias"]
    plan = sf.plan_load(url, {"model": model}, only="model")
    assert plan.bytes_wanted > 0


def test_checkpoints_are_copied_between_stores(service, tmp_path):
    state, model, _ = fresh()
    state["model"].register_buffer("large", torch.arange(5_000_000, dtype=torch.float32))
    run, far, back = f"{tmp_path}/run", service.s3("copied/run"), f"{tmp_path}/back"
    for step in (1, 2):
        sf.save(f"{run}/step-{step:08}", state)
    command("sync", run, far)
    command("copy", far, back)
    assert "already" in command("copy", f"{run}/step-00000002", back), "byte for byte"
    assert command("verify", far, "--all").count("sound") == 2
    loaded, other, _ = fresh()
    loaded["model"].register_buffer("large", torch.zeros(5_000_000))
    sf.load(back, loaded)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))


def test_a_large_tensor_goes_in_parts_and_comes_back(service):
    state = {"model": {"w": torch.arange(6_000_001, dtype=torch.float32)}, "extra": {"n": 1}}
    url = service.s3("large")
    sf.save_async(url, state).committed()
    loaded = {"model": {"w": torch.zeros(6_000_001)}, "extra": {"n": 0}}
    sf.load(url, loaded)
    assert torch.equal(loaded["model"]["w"], state["model"]["w"])
    assert loaded["extra"] == {"n": 1}


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("s3://no-such-bucket-here/x?endpoint={endpoint}", sf.Invalid, "NoSuchBucket.*make it first"),
        ("s3://{bucket}/x?endpoint={endpoint}&nonsense=1", sf.Invalid, "s3:// has the options .*endpoint, region"),
        ("s3://{bucket}/x?endpoint=ftp://h", sf.Invalid, "expected an endpoint such as https://host:port"),
        ("s3://{bucket}/x?endpoint={endpoint}&addressing=odd", sf.Invalid, "addressing=path or addressing=virtual"),
        ("s3://{bucket}/x?endpoint={endpoint}&secret_access_key=hunter2", sf.Invalid, "no secret may"),
        ("s3:///x", sf.Invalid, "expected the name of a bucket"),
        ("hdfs:///x", sf.Invalid, "expected a NameNode.s host"),
        ("s4://{bucket}/x", sf.Unsupported, "memory://, az://, gs://, hdfs://, s3://, keeper://, viewfs://"),
    ],
)
def test_bad_places_are_refused_by_name(service, url, kind, message):
    with pytest.raises(kind, match=message) as raised:
        sf.save(url.format(endpoint=service.endpoint, bucket=service.bucket), {"extra": {"a": 1}})
    assert "hunter2" not in str(raised.value)


def test_wrong_and_absent_credentials_are_told_apart(service, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(sf.Invalid, match=r"SignatureDoesNotMatch.*credentials do not allow it"):
        sf.save(service.s3("credentials/wrong"), {"extra": {"a": 1}})
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(sf.Invalid, match=r"AWS_ACCESS_KEY_ID is set, AWS_SECRET_ACCESS_KEY is not: set both"):
        sf.save(service.s3("credentials/half"), {"extra": {"a": 1}})
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(sf.Invalid, match="no credentials"):
        sf.save(service.s3("credentials/none"), {"extra": {"a": 1}})


def profile(monkeypatch, folder, config, credentials=""):
    """The environment of a user whose keys are in the files of AWS's tools."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name, text in (("AWS_CONFIG_FILE", config), ("AWS_SHARED_CREDENTIALS_FILE", credentials)):
        (folder / name).write_text(text)
        monkeypatch.setenv(name, str(folder / name))
    monkeypatch.setenv("AWS_PROFILE", "team")


def test_keys_and_endpoints_come_from_profiles(service, monkeypatch, tmp_path):
    config = f"[default]\nregion = nowhere\n[profile team]\nregion = us-east-1\nendpoint_url = {service.endpoint}\n"
    keys = f"[team]\naws_access_key_id = {service.key}\naws_secret_access_key = {service.secret}\n"
    profile(monkeypatch, tmp_path, config, keys)
    sf.save(f"s3://{service.bucket}/profiles/keys", {"extra": {"a": 1}})
    printed = {"Version": 1, "AccessKeyId": service.key, "SecretAccessKey": service.secret}
    (tmp_path / "keys").write_text(json.dumps(printed | {"Expiration": "2100-01-01T00:00:00Z"}))
    command_of = f"echo asked >> {tmp_path}/asked; cat {tmp_path}/keys"
    (tmp_path / "AWS_SHARED_CREDENTIALS_FILE").write_text("")
    (tmp_path / "AWS_CONFIG_FILE").write_text(config + f"credential_process = {command_of}\n")
    sf.save(f"s3://{service.bucket}/profiles/process", {"extra": {"a": 1}})
    assert (tmp_path / "asked").read_text() == "asked\n", "once, for all requests of a save"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[profile other]\nregion = x\n", 'AWS profile "team": neither ~/.aws/config nor ~/.aws/credentials has it'),
        ("[profile team]\nrole_arn = arn:x\n", "it says role_arn: `aws configure export-credentials --profile team`"),
        ("[profile team]\nsso_session = x\n", "it says sso_session: `aws configure export-credentials --profile team`"),
        ("[profile team]\ncredential_process = echo secret-word; exit 3\n", "credential_process.*exit status: 3"),
        ("[profile team]\ncredential_process = echo not json\n", "expected JSON with Version, AccessKeyId"),
        (
            """[profile team]\ncredential_process = echo '{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b","""
            """ "Expiration": "2001-01-01T00:00:00Z"}'\n""",
            "its keys expired at 2001",
        ),
    ],
)
def test_profiles_that_give_no_keys_are_refused_by_name(service, monkeypatch, tmp_path, config, message):
    profile(monkeypatch, tmp_path, config)
    with pytest.raises(sf.Invalid, match=message):
        sf.save(service.s3("profiles/refused"), {"extra": {"a": 1}})


def test_requests_are_few_and_stand_in_the_report(service):
    state, _, _ = fresh()
    for name in ("first", "second"):
        pending = sf.save_async(service.s3(f"requests/{name}"), state)
        pending.committed()
    requests, files = pending.report["requests"], pending.report["files_written"]
    # Files of one part each, the index of the model, the manifest, COMMIT.
    assert requests["puts"] == files + 1 + 2, requests
    assert pending.report["failures"] == []
    state = {"model": {"w": torch.ones(6_000_000)}}
    pending = sf.save_async(service.s3("requests/parts"), state)
    pending.committed()
    # Three parts of a file of 24 MB, its beginning and its end, the index, the manifest, COMMIT.
    assert pending.report["requests"]["puts"] == 3 + 2 + 1 + 2


def test_importing_starts_no_client():
    code = "import shardfast, shardfast._native, os; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "1"


def test_a_fork_in_the_middle_of_an_upload_harms_neither(service):
    state = {"model": {"w": torch.ones(6_000_000)}}
    pending = sf.save_async(service.s3("fork/parent"), state)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sf.save(service.s3("fork/child"), {"extra": {"a": 1}})
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pending.committed()
    for name in ("parent", "child"):
        assert "sound" in command("verify", service.s3(f"fork/{name}"))


ENDS = """
import os, signal, sys
import shardfast as sf, torch

url, end = sys.argv[1:]
state = {"model": {"w": torch.full((8_000_000,), 2.0)}}
ckpt = sf.Checkpointer(url)
assert ckpt.restore({"model": {"w": torch.zeros(8_000_000)}}) == 1
ckpt.save(2, state)
print("begun", flush=True)
if end == "raise":
    raise RuntimeError("the program failed")
if end == "signal":
    os.kill(os.getpid(), signal.SIGTERM)
if end == "interrupt":
    # A shell lets what it starts in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("return", 0),
        pytest.param("raise", 1, marks=pytest.mark.campaign),
        pytest.param("interrupt", -signal.SIGINT, marks=pytest.mark.campaign),
        ("signal", -signal.SIGTERM),
    ],
)
def test_an_end_in_the_middle_of_an_upload_is_as_on_disk(service, end, code):
    url = service.s3(f"ends/{end}")
    with sf.Checkpointer(url) as ckpt:
        ckpt.save(1, {"model": {"w": torch.ones(8_000_000)}})
    done = subprocess.run([sys.executable, "-c", ENDS, url, end], capture_output=True, text=True, timeout=100)
    assert "begun" in done.stdout, done.stderr
    assert done.returncode == code, done.stderr
    loaded = {"model": {"w": torch.zeros(8_000_000)}}
    step = sf.Checkpointer(url).restore(loaded)
    # A process that ends by itself waits for its saves; one that a signal kills leaves the earlier checkpoint, or this
    # one if it was there already.
    assert step in ((1, 2) if end == "signal" else (2,))
    assert torch.equal(loaded["model"]["w"], torch.full((8_000_000,), float(step)))
    with sf.Checkpointer(url) as ckpt:
        ckpt.save(3, loaded)
    assert command("verify", "--all", url).count("sound") == step + 1


def test_the_command_pins_sweeps_and_verifies_without_reading(service, tmp_path):
    run = service.s3("kept")
    for step in (1, 2):
        with sf.Checkpointer(run, keep=sf.last(1)) as ckpt:
            ckpt.save(step, {"model": torch.nn.Linear(600, 600)})
            ckpt.wait()
            command("pin", run, "--note", f"the {step}.")
    listed = command("ls", run)
    assert [listed.count(word) for word in ("pinned: the 1.", "pinned: the 2.", "leaving")] == [1, 1, 0]
    said = command("verify", "--stored", "--all", run)
    assert said.count("by the checksums that the storage keeps") == 2
    assert "removed 0 files" in command("sweep", run)
    command("sweep", run, "--older-than", "5h", code=2)
    command("copy", run, tmp_path / "copy", "--limit", "100MB")
    command("verify", "--stored", tmp_path / "copy", code=4)
    assert "sound" in command("verify", tmp_path / "copy")
