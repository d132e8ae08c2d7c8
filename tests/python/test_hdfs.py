"""Saves, loads and the command on a real HDFS: a NameNode and three DataNodes."""

import ast
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import shardfast as sf
import torch
from nets import net
from servers import running_hdfs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

COMMAND = Path(sys.executable).with_name("shardfast")
FULL = torch.arange(3 * 1024 * 1024, dtype=torch.float32).reshape(3072, 1024)
"""12 MiB, 36 MiB as three tensors: an object of two parts."""


@pytest.fixture(scope="module")
def hdfs():
    with running_hdfs() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


def state_of(world, *, is_zero=False) -> dict:
    mesh = init_device_mesh("cpu", (world,))

    def tensor(number) -> DTensor:
        whole = torch.zeros_like(FULL) if is_zero else FULL + number
        return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)

    return {"model": {f"w{number}": tensor(number) for number in range(8)}, "extra": {"step": 0 if is_zero else 7}}


def saves(rank, world, url, environment):
    os.environ.update(environment)
    pending = sf.save_async(url, state_of(world))
    pending.committed()
    return pending.report


def loads(rank, world, url, environment):
    os.environ.update(environment)
    state = state_of(world, is_zero=True)
    sf.load(url, state)
    expected = state_of(world)
    assert state["extra"]["step"] == 7
    for name, tensor in expected["model"].items():
        assert torch.equal(state["model"][name].to_local(), tensor.to_local()), name


def files_of(hdfs, directory):
    """Names of all files below a directory, by Hadoop's own tool."""
    listed = hdfs.tool("org.apache.hadoop.fs.FsShell", "-ls", "-R", "-C", f"/{hdfs.bucket}/{directory}")
    return [Path(line) for line in listed.splitlines()]


def test_two_ranks_save_and_three_load(ranks, hdfs):
    url = hdfs.hdfs("layouts/step-00000007")
    reports = ranks(2)(saves, url, hdfs.environment)
    ranks(3)(loads, url, hdfs.environment)
    for report in reports:
        assert report["failures"] == [] and report["requests"]["puts"] > 0, report
    assert not [path for path in files_of(hdfs, "layouts/step-00000007") if path.name.startswith(".tmp-")]
    checked = hdfs.tool("org.apache.hadoop.hdfs.tools.DFSck", f"/{hdfs.bucket}/layouts")
    assert "HEALTHY" in checked


def told(*arguments):
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_its_retention_and_the_command(hdfs, tmp_path):
    run, state = hdfs.hdfs("run"), {"model": net()}
    with sf.Checkpointer(run, every=sf.steps(1), keep=sf.last(2)) as ckpt:
        for step in range(1, 5):
            ckpt.step(step, state)
            ckpt.wait()
    newest = sf.Checkpointer(run)
    assert newest.restore({"model": net()}) == 4
    newest.close()
    listed = json.loads(told("ls", run, "--json"))
    assert {one["step"] for one in listed["checkpoints"] if one["status"] == "committed"} == {3, 4}, listed
    step, here, again = f"{run}/step-00000004", str(tmp_path / "here"), hdfs.hdfs("again")
    told("copy", step, here)
    told("copy", here, again)
    told("verify", again)
    told("diff", step, again)
    told("sync", run, str(tmp_path / "run"))
    told("sync", str(tmp_path / "run"), hdfs.hdfs("other"))
    sf.load(f"{hdfs.hdfs('other')}/step-00000004", state)


def test_a_quota_is_looked_at_before_the_first_byte(hdfs):
    admin, limited = "org.apache.hadoop.hdfs.tools.DFSAdmin", f"/{hdfs.bucket}/limited"
    sf.save(hdfs.hdfs("limited/step-00000001"), {"extra": {"step": 1}})
    # Each byte is stored three times.
    hdfs.tool(admin, "-setSpaceQuota", "300m", limited)
    url = hdfs.hdfs("limited/step-00000002")
    with pytest.raises(sf.Exhausted) as caught:
        sf.save(url, {"model": {"w": torch.zeros(400_000_000)}})
    said = str(caught.value)
    assert said.startswith(f"save {url}: expected room for 1.6 GB below the quota of {limited}, found "), said
    assert said.endswith(" MB of 105 MB left: raise the quota or keep fewer checkpoints"), said
    assert not [path for path in files_of(hdfs, "limited/step-00000002") if path.suffix]
    sf.save(url, {"model": {"w": FULL}})


def test_a_mount_table_leads_to_the_same_files(hdfs, tmp_path):
    sf.save(hdfs.hdfs("mounted/one"), {"extra": {"x": 1}})
    site = (Path(hdfs.environment["HADOOP_CONF_DIR"]) / "hdfs-site.xml").read_text()
    (tmp_path / "hdfs-site.xml").write_text(site)
    settings = {"fs.viewfs.mounttable.cluster.link./runs": hdfs.hdfs("mounted"), "fs.defaultFS": hdfs.endpoint}
    properties = [f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items()]
    (tmp_path / "core-site.xml").write_text(f"<configuration>{''.join(properties)}</configuration>")
    program = (
        "import torch, shardfast as sf\n"
        "state = {'extra': {'x': 0}}\n"
        "sf.load('viewfs://cluster/runs/one', state)\n"
        "big = {'model': {'w': torch.ones(10_000_000)}}\n"
        "pending = sf.save_async('viewfs://cluster/runs/big', big)\n"
        "pending.committed()\n"
        "print(state['extra']['x'], pending.report['failures'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HADOOP_CONF_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "1 []\n"), done.stderr
    assert "big" in [path.name for path in files_of(hdfs, "mounted")]


ELSEWHERE = """
import os, sys, torch, shardfast as sf
url, count = sys.argv[1], int(sys.argv[2])
def connections():
    with open("/proc/self/net/tcp") as lines:
        inodes = {line.split()[9] for line in lines if line.split()[3] == "01"}
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit() and
             os.path.exists(f"/proc/self/fd/{fd}")]
    return sum(link.removeprefix("socket:[").rstrip("]") in inodes for link in links)
failures, used = [], []
for number in range(count):
    pending = sf.save_async(f"{url}/{number}", {"model": {"w": torch.ones(10_000_000)}, "extra": {"x": number}})
    pending.committed()
    failures += pending.report["failures"]
    used.append(connections())
state = {"extra": {"x": 0}}
sf.load(f"{url}/{count - 1}", state, strict=False)
print([state["extra"]["x"], used[0], used[-1], *failures])
"""


def elsewhere(url, count, **environment):
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, url, str(count)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def test_saves_keep_no_connection_of_their_own(hdfs):
    loaded, first, last, *failures = elsewhere(hdfs.hdfs("connections"), 8)
    assert (loaded, failures) == (7, []) and last <= first + 2, (first, last)


def test_a_report_says_why_parts_were_copied(hdfs, tmp_path):
    for name in ("core-site.xml", "hdfs-site.xml"):
        (tmp_path / name).write_text((Path(hdfs.environment["HADOOP_CONF_DIR"]) / name).read_text())
    site = tmp_path / "hdfs-site.xml"
    off = "<property><name>dfs.webhdfs.enabled</name><value>false</value></property></configuration>"
    site.write_text(site.read_text().replace("</configuration>", off))
    loaded, _, _, *failures = elsewhere(hdfs.hdfs("copied"), 1, HADOOP_CONF_DIR=str(tmp_path))
    assert loaded == 0 and len(failures) == 1 and "WebHDFS is switched off" in failures[0], failures


class Login(http.server.BaseHTTPRequestHandler):
    """A proxy that answers each request with a page."""

    def do_POST(self):
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"login")

    do_GET = do_POST

    def log_message(self, *_):
        pass


def test_answers_of_others_than_the_namenode_are_not_believed(hdfs, tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Login) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{page.server_port}"
        # Nothing of a cluster goes through a proxy.
        proxied = {"HTTP_PROXY": f"http://{address}", "http_proxy": f"http://{address}", "no_proxy": ""}
        loaded, _, _, *failures = elsewhere(hdfs.hdfs("proxied"), 1, **proxied)
        assert (loaded, failures) == (0, [])
        for name in ("core-site.xml", "hdfs-site.xml"):
            text = (Path(hdfs.environment["HADOOP_CONF_DIR"]) / name).read_text()
            (tmp_path / name).write_text(text.replace(hdfs.http, address))
        loaded, _, _, *failures = elsewhere(hdfs.hdfs("answered"), 1, HADOOP_CONF_DIR=str(tmp_path))
        page.shutdown()
    assert loaded == 0 and len(failures) == 1 and "not as a NameNode does" in failures[0], failures


def test_an_erasure_coding_policy_that_is_written_wrongly_is_refused(hdfs):
    admin, policy = "org.apache.hadoop.hdfs.tools.ECAdmin", "XOR-2-1-1024k"
    hdfs.tool(admin, "-enablePolicy", "-policy", policy)
    hdfs.tool("org.apache.hadoop.fs.FsShell", "-mkdir", f"/{hdfs.bucket}/coded")
    hdfs.tool(admin, "-setPolicy", "-path", f"/{hdfs.bucket}/coded", "-policy", policy)
    with pytest.raises(sf.Unsupported, match=f"found {policy}: the client library writes parity"):
        sf.save(hdfs.hdfs("coded/one"), {"extra": {"x": 1}})
    assert not files_of(hdfs, "coded")


def test_a_storage_policy_is_that_of_all_that_is_saved(hdfs):
    run = f"{hdfs.hdfs('placed')}?storage_policy=ALL_SSD"
    with sf.Checkpointer(run, every=sf.steps(1)) as ckpt:
        ckpt.step(1, {"model": torch.nn.Linear(5, 4)})
    found = hdfs.tool(
        "org.apache.hadoop.hdfs.tools.StoragePolicyAdmin",
        "-getStoragePolicy",
        "-path",
        f"/{hdfs.bucket}/placed/step-00000001/COMMIT",
    )
    assert "ALL_SSD" in found
    assert sf.Checkpointer(run).restore({"model": torch.nn.Linear(5, 4)}) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("storage_policy=FROZEN", "storage_policy=FROZEN was not set: .*FROZEN"),
        ("replication=1000", "from 1 to 512"),
        ("block_size=1099511627776", "from 1 to 2147483647"),
        ("block_size=513", "is less than configured minimum"),
    ],
)
def test_options_that_the_namenode_refuses_are_the_callers(hdfs, options, message):
    began = time.monotonic()
    with pytest.raises(sf.Invalid, match=message):
        sf.save(f"{hdfs.hdfs('options')}?{options}", {"extra": {"x": 1}}, timeout_s=60)
    assert time.monotonic() - began < 20


def test_what_is_made_has_the_permissions_of_the_user(hdfs):
    shell = "org.apache.hadoop.fs.FsShell"
    hdfs.tool(shell, "-mkdir", f"/{hdfs.bucket}/open")
    hdfs.tool(shell, "-chmod", "1777", f"/{hdfs.bucket}/open")
    elsewhere(hdfs.hdfs("open/run"), 1, HADOOP_USER_NAME="bob")
    listed = hdfs.tool(shell, "-ls", "-R", f"/{hdfs.bucket}/open").splitlines()
    modes = {line.split()[0] for line in listed if line[:1] in "d-"}
    assert modes == {"drwxr-xr-x", "-rw-r--r--"}, listed


def test_a_forked_child_is_refused(hdfs):
    program = (
        "import os, shardfast as sf\n"
        f"sf.save({hdfs.hdfs('forked')!r}, {{'extra': {{'x': 1}}}})\n"
        "if (child := os.fork()) == 0:\n"
        "    try:\n"
        f"        sf.load({hdfs.hdfs('forked')!r}, {{'extra': {{'x': 0}}}})\n"
        "    except sf.Unsupported as error:\n"
        "        print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        f"sf.load({hdfs.hdfs('forked')!r}, {{'extra': {{'x': 0}}}})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "HDFS was used before this process was forked" in done.stdout, done


def test_a_training_outlives_its_namenode(hdfs):
    run, state = hdfs.hdfs("killed"), {"model": torch.nn.Linear(500, 400)}
    back = threading.Thread(target=lambda: (time.sleep(1), hdfs.restart("namenode")))
    with sf.Checkpointer(run, every=sf.steps(1)) as ckpt:
        ckpt.step(1, state)
        ckpt.wait()
        hdfs.kill("namenode")
        back.start()
        ckpt.step(2, state)
        ckpt.wait()
    back.join()
    assert json.loads(told("verify", f"{run}/step-00000002", "--json"))
    assert json.loads(told("verify", f"{run}/step-00000001", "--json"))


@pytest.mark.skipif("SHARDFAST_HDFS_KILLS" not in os.environ, reason="it takes minutes: make campaigns")
def test_a_datanode_that_dies_in_a_save_costs_no_bytes(hdfs):
    # Two of three replicas: the NameNode names the dead node for minutes, and each try may find the other two.
    url = hdfs.hdfs("datanode?replication=2")
    state = {"model": {"w": torch.arange(20_000_000, dtype=torch.float32)}}
    pending = sf.save_async(url, state)
    hdfs.kill("datanode1")
    try:
        pending.committed()
        loaded = {"model": {"w": torch.zeros(20_000_000)}}
        sf.load(url, loaded)
        assert torch.equal(loaded["model"]["w"], state["model"]["w"])
    finally:
        hdfs.restart("datanode1")
