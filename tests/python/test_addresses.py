"""Where ranks reach each other: found by the system, or said by the environment; tried between machines."""

import json
import os
import subprocess
import sys

import pytest
import shardfast as sf
from machines import Machines, machines, shell
from shardfast import addresses

RANK = """
import json, os, sys, numpy as np, shardfast as sf
rank = int(os.environ["RANK"])
try:
    sf.save(sys.argv[1], {"model": {f"w{rank}": np.full(1000, 1.0)}}, timeout_s=float(sys.argv[2]))
except sf.Error as error:
    print(json.dumps([type(error).__name__, str(error)]))
else:
    print(json.dumps(["saved", ""]))
"""
PORT = 20500
ALLOWED = "20000-20999"


def saved(cluster: Machines, root: str, url: object, timeout_s: float, **environment: str) -> list[list[str]]:
    """What a rank on each machine says of a save."""
    ranks = []
    for rank in range(cluster.count):
        own = {
            **{name: text for name, text in os.environ.items() if name != "LOCAL_RANK"},
            "RANK": f"{rank}",
            "WORLD_SIZE": f"{cluster.count}",
            "LOCAL_WORLD_SIZE": "1",
            "SHARDFAST_ROOT": f"{root}:{PORT}",
            "SHARDFAST_TOKEN": "secret",
            # Rank 3 joins through rank 1, at a port that the system chooses.
            "SHARDFAST_FANOUT": "2",
            **environment,
        }
        command = [*cluster.entering(rank), sys.executable, "-c", RANK, str(url), str(timeout_s)]
        ranks.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True))
    try:
        return [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def test_machines_with_addresses_of_version_6_only(tmp_path):
    with machines(3) as cluster:
        for at in range(3):
            shell(f"ip -n {cluster.space(at)} addr flush dev eth0 scope global")
            shell(f"ip -n {cluster.space(at)} addr add fd77::{at + 1}/64 dev eth0 nodad")
        said = saved(cluster, "[fd77::1]", tmp_path / "found", 60)
        assert said == [["saved", ""]] * 3
        said = saved(cluster, "[fd77::1]", tmp_path / "chosen", 60, SHARDFAST_ADDRESS="fd77::/64")
        assert said == [["saved", ""]] * 3


def test_a_firewall_lets_only_some_ports_of_one_of_two_networks_through(tmp_path):
    with machines(4) as cluster:
        net = cluster.address(0).rpartition(".")[0]
        for at in range(4):
            for command in (
                f"addr add 10.78.0.{at + 1}/24 dev eth0",
                f"rule add pref 20 ipproto tcp iif eth0 dport {ALLOWED} lookup local",
                f"rule add pref 21 ipproto tcp iif eth0 sport {ALLOWED} lookup local",
                f"rule add pref 22 ipproto tcp iif eth0 to {net}.0/24 blackhole",
                "rule add pref 100 lookup local",
                "rule del pref 0",
            ):
                shell(f"ip -n {cluster.space(at)} {command}")
        root = cluster.address(0)
        said = saved(cluster, root, tmp_path / "refused", 15)
        assert all(kind == "Unavailable" for kind, _ in said), said
        _, text = said[3]
        assert f"rank 3 cannot reach rank 2 at {cluster.address(2)}:" in text, text
        assert "SHARDFAST_PORTS (first-last)" in text and "SHARDFAST_ADDRESS (an address, a network" in text, text
        assert f"rank 0 is at {root}" in said[0][1] and "rank 3 has not called save" in said[0][1], said[0]
        for number, chosen in enumerate([{"SHARDFAST_PORTS": ALLOWED}, {"SHARDFAST_ADDRESS": "10.78.0.0/24"}]):
            assert saved(cluster, root, tmp_path / f"{number}", 60, **chosen) == [["saved", ""]] * 4, chosen


@pytest.mark.parametrize("text", ["no-interface", "10.254.254.254", "203.0.113.0/24", "fd99::/16"])
def test_an_address_that_this_machine_has_not_is_refused(monkeypatch, text):
    monkeypatch.setenv(addresses.ADDRESS, text)
    with pytest.raises(sf.Invalid, match=r"SHARDFAST_ADDRESS=.*expected an address of this machine.*lo 127\.0\.0\.1"):
        addresses.host(2, "10.0.0.1")


@pytest.mark.parametrize("text", ["lo", "127.0.0.1", "127.0.0.0/8"])
def test_an_address_is_said_by_itself_its_network_or_its_interface(monkeypatch, text):
    monkeypatch.setenv(addresses.ADDRESS, text)
    assert addresses.host(2, "10.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("text", ["0", "70000", "5-4", "a-b", "1-2-3", "-5"])
def test_ports_that_are_none_are_refused(monkeypatch, text):
    monkeypatch.setenv(addresses.PORTS, text)
    with pytest.raises(sf.Invalid, match=r"SHARDFAST_PORTS=.*such as '20000-20999'"):
        addresses.ports()


def says(rank, world, url):
    os.environ[addresses.ADDRESS] = "10.254.254.254" if rank == 1 else "127.0.0.0/8"
    with pytest.raises(sf.Invalid, match=r"SHARDFAST_ADDRESS='10\.254\.254\.254'"):
        sf.save(url, {"x": {"n": 1}})


def test_all_ranks_learn_of_an_address_that_one_has_not(ranks, tmp_path):
    ranks(3)(says, str(tmp_path / "save"))
