"""HDFS with Kerberos, and an encryption zone: parts cannot be joined there, they are copied, and the report says why.

Each case runs in a process of its own: the library of Kerberos and Hadoop's client keep what they found at first.
"""

import json
import os
import subprocess
import sys
import time

import pytest
from servers import Hdfs, running_hdfs

IN_CAMPAIGNS = pytest.mark.skipif(
    "SHARDFAST_HDFS_SECURED" not in os.environ, reason="it takes more servers, and minutes: make campaigns"
)

PROGRAM = """
import json, sys
import numpy as np, shardfast as sf

def state_of(number):
    # An object of two parts.
    return {"model": {"w": np.full(9_000_000, number, dtype=np.float32)}, "extra": {"number": number}}

what, url = sys.argv[1:]
try:
    report = {}
    if what == "save":
        pending = sf.save_async(url, state_of(3))
        pending.committed()
        report = pending.report
    state = state_of(0)
    sf.load(url, state)
    assert bool((state["model"]["w"] == 3).all()) and state["extra"]["number"] == 3
    print(json.dumps({"failures": report.get("failures")}))
except sf.Error as error:
    print(json.dumps({"kind": type(error).__name__, "error": str(error)}))
"""

BOUND_S = 60
"""Time in which what cannot work is refused, with the start of Python."""


def ran(what: str, url: str, environment: dict[str, str]) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what, url],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    return json.loads(done.stdout)


def reasons(said: dict) -> list[str]:
    """Reasons of refused joins, from the report of a save that succeeded."""
    assert said.get("failures") is not None, said
    joins = [text for text in said["failures"] if "concat failed: " in text]
    assert joins == said["failures"], said
    return [text.split("concat failed: ")[1] for text in joins]


def blocks_of(hdfs: Hdfs, directory: str) -> list[str]:
    """What `fsck` says of the data files of this model."""
    checked = hdfs.tool("org.apache.hadoop.hdfs.tools.DFSck", f"/{hdfs.bucket}/{directory}", "-files")
    assert "is HEALTHY" in checked, checked
    lines = checked.splitlines()
    assert not [line for line in lines if ".tmp-" in line]
    return [line for line in lines if "/model/" in line and ".safetensors 3" in line]


@pytest.fixture(scope="module")
def kerberos():
    with running_hdfs("hdfs-kerberos") as server:
        yield server


@IN_CAMPAIGNS
def test_tickets_come_from_a_keytab_or_from_the_cache(kerberos):
    url, keytab = kerberos.hdfs("kerberos"), kerberos.environment
    joins = reasons(ran("save", url, keytab))
    assert len(joins) == 1 and joins[0].startswith("WebHDFS of a cluster with Kerberos takes a token"), joins
    files = blocks_of(kerberos, "kerberos")
    assert len(files) == 1 and "1 block(s)" in files[0], files
    # The process before has left its ticket there.
    tickets = {name: value for name, value in keytab.items() if name != "KRB5_CLIENT_KTNAME"}
    assert ran("load", url, tickets) == {"failures": None}


@IN_CAMPAIGNS
def test_a_token_of_the_file_lets_parts_be_joined_and_stands_in_for_a_ticket(kerberos, tmp_path):
    file = tmp_path / "tokens"
    kerberos.tool("org.apache.hadoop.hdfs.tools.DelegationTokenFetcher", "--renewer", "hdfs", file)
    token, url = {"HADOOP_TOKEN_FILE_LOCATION": str(file)}, kerberos.hdfs("token")
    assert reasons(ran("save", url, {**kerberos.environment, **token})) == []
    files = blocks_of(kerberos, "token")
    assert len(files) == 1 and "2 block(s)" in files[0], files
    # The token names the address.
    nothing = {"KRB5CCNAME": str(tmp_path / "none"), "KRB5_CLIENT_KTNAME": "/dev/null"}
    url = kerberos.hdfs("token/other").replace("localhost", "127.0.0.1")
    assert reasons(ran("save", url, {**kerberos.environment, **nothing, **token})) == []

    whole = file.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"HDTS\x05"):
        file.write_bytes(damaged)
        said = ran("save", url, {**kerberos.environment, **nothing, **token})
        assert said["kind"] == "Invalid" and f"HADOOP_TOKEN_FILE_LOCATION names {file}" in said["error"], said


@IN_CAMPAIGNS
def test_without_a_ticket_the_error_says_so_soon(kerberos, tmp_path):
    url, nothing = kerberos.hdfs("refused"), {"KRB5CCNAME": str(tmp_path / "none"), "KRB5_CLIENT_KTNAME": "/dev/null"}
    for what in ("save", "load"):
        began = time.monotonic()
        said = ran(what, url, {**kerberos.environment, **nothing})
        assert time.monotonic() - began < BOUND_S
        assert said["kind"] == "Invalid" and url in said["error"], said
        assert "No Kerberos credentials available" in said["error"] and "kinit" in said["error"], said


@pytest.fixture(scope="module")
def zone():
    """An HDFS whose directory `zone` is an encryption zone."""
    with running_hdfs("hdfs-kms") as server:
        path = f"/{server.bucket}/zone"
        server.tool("org.apache.hadoop.crypto.key.KeyShell", "create", "training")
        server.tool("org.apache.hadoop.fs.FsShell", "-mkdir", path)
        server.tool("org.apache.hadoop.hdfs.tools.CryptoAdmin", "-createZone", "-keyName", "training", "-path", path)
        yield server


@IN_CAMPAIGNS
def test_a_save_into_an_encryption_zone_copies_its_parts(zone):
    joins = reasons(ran("save", zone.hdfs("zone/a"), zone.environment))
    assert len(joins) == 1 and "encryption zone" in joins[0], joins
    files = blocks_of(zone, "zone/a")
    assert len(files) == 1 and "1 block(s)" in files[0], files
    # Outside of the zone the parts are joined.
    assert reasons(ran("save", zone.hdfs("outside"), zone.environment)) == []


@IN_CAMPAIGNS
def test_an_encryption_zone_without_keys_is_refused_soon(zone, tmp_path):
    for name in ("core-site.xml", "hdfs-site.xml"):
        text = (zone.directory / "conf" / name).read_text()
        (tmp_path / name).write_text(text.replace("hadoop.security.key.provider.path", "another"))
    began = time.monotonic()
    said = ran("save", zone.hdfs("zone/b"), {**zone.environment, "HADOOP_CONF_DIR": str(tmp_path)})
    assert time.monotonic() - began < BOUND_S
    assert said["kind"] == "Invalid" and "hadoop.security.key.provider.path" in said["error"], said
