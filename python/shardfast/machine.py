"""Python's findings about this machine for ``shardfast doctor``: frameworks, addresses, settings."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import platform
import re
import socket

from . import adapters as frameworks
from . import session

Finding = tuple[str, str, str, str]
"""Its name; ``ok``, ``limited`` or ``failed``; what was found; what follows for saves and loads."""


def examine() -> tuple[int | None, list[Finding]]:
    """The staging budget of this process if its environment sets one, and what was found."""
    settings = session.settings()
    findings = [_python(), *_frameworks(), _address(), _encryption(settings.is_encrypted)]
    for problem in settings.problems:
        name, _, what = problem.partition(": ")
        findings.append(("settings", "failed", name, f"saves and loads of a job fail: {what}"))
    return settings.staging_bytes, findings


def _python() -> Finding:
    return ("Python", "ok", platform.python_version(), "it needs no package beside Shardfast; frameworks are optional")


def _frameworks() -> list[Finding]:
    findings = []
    for name, (found, is_there) in frameworks.installed().items():
        oldest = _oldest_tested(name)
        if not is_there:
            findings.append((name, "limited", found, f"nothing of {name} can be saved or loaded in this environment"))
        elif _numbers(found) < _numbers(oldest):
            findings.append(
                (name, "limited", found, f"the oldest version that is tested is {oldest}: take a newer one")
            )
        else:
            findings.append((name, "ok", found, f"its tensors are saved and loaded; tested from {oldest} on"))
    return findings


def _oldest_tested(framework: str) -> str:
    """The version in this package's extra requirement of that name."""
    for requirement in importlib.metadata.requires("shardfast") or []:
        match = re.match(rf"{framework}>=([\d.]+)", requirement)
        if match:
            return match[1]
    return "0"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def _address() -> Finding:
    address = session.address()
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((address, 0))
            listener.listen()
    except OSError as error:
        return ("address", "failed", address, f"ranks cannot join each other: listening there fails: {error}")
    if ipaddress.ip_address(address).is_loopback:
        return (
            "address",
            "limited",
            address,
            "only ranks on this machine can join each other: MASTER_ADDR is this machine, or there is no default route",
        )
    return (
        "address",
        "ok",
        address,
        "ranks listen here, each on a port of the system's choice; firewalls must let ranks of other machines through",
    )


def _encryption(is_encrypted: bool) -> Finding:
    if is_encrypted:
        return ("encryption", "ok", "certificate and key are readable", "connections between ranks use mutual TLS")
    names = f"{session.TLS_CERT}, {session.TLS_KEY} and {session.TLS_CA}"
    return (
        "encryption",
        "ok",
        "off",
        f"ranks talk in plain text, and prove by a secret who they are; {names} turn it on",
    )
