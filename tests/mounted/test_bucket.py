"""A bucket that is mounted as a file system is refused before the first byte, with its own URL."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import shardfast as sf
from servers import running

COMMAND = Path(sys.executable).with_name("shardfast")
AT = Path(os.environ["SHARDFAST_TEST_MOUNTED"])


@pytest.fixture
def bucket(tmp_path):
    """A bucket of a real server, mounted by s3fs."""
    with running("minio") as server:
        place, key = tmp_path / "mnt", tmp_path / "key"
        place.mkdir()
        key.write_text(f"{server.key}:{server.secret}")
        key.chmod(0o600)
        libraries = ":".join(str(AT / path) for path in ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"))
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries, "PATH": f"{os.environ['PATH']}:{AT / 'bin'}"}
        options = f"passwd_file={key},url={server.endpoint},use_path_request_style,endpoint=us-east-1"
        subprocess.run([AT / "usr/bin/s3fs", server.bucket, place, "-o", options], env=environment, check=True)
        try:
            until = time.monotonic() + 20
            while not place.is_mount():
                assert time.monotonic() < until, "s3fs has not mounted the bucket"
                time.sleep(0.05)
            yield server, place
        finally:
            subprocess.run(["umount", "--lazy", place], check=True)


def test_a_mounted_bucket_is_refused_by_name_before_the_first_byte(bucket):
    server, place = bucket
    run = place / "runs"
    run.mkdir()
    with pytest.raises(sf.Unsupported, match=r"found fuse\.s3fs, which can neither rename .*: use s3://<bucket>/runs"):
        sf.save(run / "step-00000001", {"extra": {"x": 1}}, step=1)
    assert [path for path in run.rglob("*") if path.is_file()] == []
    told = subprocess.run([COMMAND, "doctor", run, "--json"], capture_output=True, text=True)
    (found,) = [one for one in json.loads(told.stdout)["findings"] if one["name"] == "file system"]
    assert (told.returncode, found["status"]) == (1, "failed") and "use s3://<bucket>/" in found["follows"], found

    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        sf.save(server.s3("runs/step-00000001"), {"extra": {"x": 1}}, step=1)
        state = {"extra": {"x": 0}}
        sf.load(server.s3("runs/step-00000001"), state)
    assert state == {"extra": {"x": 1}}
