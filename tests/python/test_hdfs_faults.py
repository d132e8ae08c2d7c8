"""Calls to a NameNode are spoiled, and connections to DataNodes cut, one by one: nothing that was saved is lost."""

import os
from pathlib import Path

import pytest
import shardfast as sf
import torch
from hdfs_proxy import WAYS, DataProxy, Proxy
from servers import running_hdfs

FEW = 12
ONE_IN = int(os.environ.get("SHARDFAST_HDFS_FAULTS_ONE_IN", FEW))

# A call without an answer takes half a minute.
IN_CAMPAIGNS = pytest.mark.skipif(ONE_IN == FEW, reason="it takes minutes: make campaigns")
OF_CALLS = [pytest.param(way, marks=IN_CAMPAIGNS) if way == "silent" else way for way in WAYS]


BY_NAMES = "<property><name>dfs.client.use.datanode.hostname</name><value>true</value></property></configuration>"


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """The proxies before the NameNode and before the DataNodes, and the URL of a directory behind them."""
    with running_hdfs() as server, pytest.MonkeyPatch.context() as patch:
        proxy = Proxy(server.namenode)
        data = DataProxy([path.read_text().strip() for path in sorted(server.directory.glob("datanode*.address"))])
        site = Path(server.environment["HADOOP_CONF_DIR"]) / "hdfs-site.xml"
        conf = tmp_path_factory.mktemp("conf")
        (conf / "hdfs-site.xml").write_text(site.read_text().replace("</configuration>", BY_NAMES))
        (conf / "core-site.xml").write_text(
            "<configuration><property><name>fs.defaultFS</name>"
            f"<value>hdfs://127.0.0.1:{proxy.port}</value></property></configuration>"
        )
        patch.setenv("HADOOP_CONF_DIR", str(conf))
        patch.setenv("HADOOP_USER_NAME", server.environment["HADOOP_USER_NAME"])
        yield proxy, data, f"hdfs://127.0.0.1:{proxy.port}/{server.bucket}"
        proxy.close()
        data.close()


@pytest.fixture
def place(servers):
    proxy, data, base = servers
    proxy.arm(None, "")
    data.arm(None, "")
    return proxy, base


@pytest.fixture
def data(servers, place):
    _, data, base = servers
    return data, f"{base}/data"


def state_of(number, size=9_000_000) -> dict:
    """An object of two parts, and a small one."""
    return {"model": {"w": torch.full((size,), float(number))}, "extra": {"number": number}}


def loaded(url):
    state = state_of(0)
    sf.load(url, state, timeout_s=120)
    number = state["extra"]["number"]
    assert bool((state["model"]["w"] == number).all())
    return number


def calls_of(proxy, work):
    proxy.arm(None, "")
    work()
    return proxy.calls


@pytest.mark.parametrize("way", OF_CALLS)
def test_each_call_of_a_save(place, way):
    proxy, base = place
    run = f"{base}/{way.replace(' ', '-')}"
    sf.save(f"{run}/before", state_of(1))
    number = calls_of(proxy, lambda: sf.save(f"{run}/counted", state_of(2)))
    assert number > 8, proxy.methods
    for call in range(0, number, ONE_IN if way != "silent" else 4 * ONE_IN):
        url = f"{run}/spoiled-{call}"
        proxy.arm(call, way)
        try:
            sf.save(url, state_of(3), timeout_s=120)
        except sf.Error as error:
            proxy.arm(None, "")
            with pytest.raises(sf.NotFound):
                loaded(url)
            assert str(error)
            print(f"{way} {call}: {error}")
        else:
            proxy.arm(None, "")
            assert loaded(url) == 3
    assert loaded(f"{run}/before") == 1


@pytest.mark.parametrize("way", OF_CALLS)
def test_each_call_of_a_load(place, way):
    proxy, base = place
    url = f"{base}/loads-{way.replace(' ', '-')}"
    sf.save(url, state_of(4))
    number = calls_of(proxy, lambda: loaded(url))
    for call in range(0, number, ONE_IN):
        proxy.arm(call, way)
        assert loaded(url) == 4


MOMENTS = 30 if ONE_IN == 1 else 3


def moments_of(data, work, way) -> list[int]:
    """Bytes of some work, as counted, at which a connection is cut."""
    data.arm(None, "")
    work()
    return [data.bytes[way] * (2 * moment + 1) // (2 * MOMENTS) for moment in range(MOMENTS)]


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_data_connection_of_a_save_is_cut(data, way):
    data, run = data[0], f"{data[1]}/saves-{way}"
    sf.save(f"{run}/before", state_of(1))
    cuts = 0
    for moment in moments_of(data, lambda: sf.save(f"{run}/counted", state_of(2)), way):
        url = f"{run}/cut-{moment}"
        data.arm(moment, way)
        sf.save(url, state_of(3), timeout_s=120)
        cuts += data.cuts
        data.arm(None, "")
        assert loaded(url) == 3
    assert cuts > MOMENTS // 2 and loaded(f"{run}/before") == 1


def test_a_data_connection_of_a_load_is_cut(data):
    data, url = data[0], f"{data[1]}/loads"
    sf.save(url, state_of(4))
    cuts = 0
    for moment in moments_of(data, lambda: loaded(url), "down"):
        data.arm(moment, "down")
        assert loaded(url) == 4
        cuts += data.cuts
    assert cuts > MOMENTS // 2
