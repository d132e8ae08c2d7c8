"""The address and the ports at which other ranks reach this process."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import re
import socket
import struct
from pathlib import Path

from .errors import Invalid

ADDRESS = "SHARDFAST_ADDRESS"
"""The environment variable that says where other ranks reach this process: an address of this machine, a network such
as ``10.0.0.0/8`` in which it has one, or the name of an interface."""

PORTS = "SHARDFAST_PORTS"
"""The environment variable with the ports at which ranks listen for each other, ``first-last``; without it any."""

CHOOSE = f"{ADDRESS} (an address, a network such as 10.0.0.0/8 or an interface) and {PORTS} (first-last) choose others"
"""Advice for ranks that do not reach each other."""

_IPv4 = ipaddress.IPv4Address
_IPv6 = ipaddress.IPv6Address

# Of linux/sockios.h; struct ifreq has 40 bytes on 64-bit systems: a name of 16, and a socket address.
_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_IFREQS_MAX = 1024

# Unassigned (RFC 5737, RFC 3849): the routes to them are the default ones. No packet is sent.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")


def host(world: int, master: str) -> str:
    """The address at which every other rank can reach this one; ``master`` is that of rank 0.

    Raises:
        Invalid: If :data:`ADDRESS` names none of this machine.
    """
    if text := os.environ.get(ADDRESS):
        return _chosen(text)
    return found(world, master)


def found(world: int, master: str) -> str:
    """The address that :func:`host` returns if no variable says it."""
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world) or master == "localhost" or _is_loopback(master):
        return "127.0.0.1"
    for peer in (master, *_ELSEWHERE):
        address = _route_to(peer)
        if address is not None and not _is_loopback(address):
            return address
    return "127.0.0.1"


def ports() -> tuple[int, int] | None:
    """The first and last port at which this process may listen for other ranks; ``None`` for any.

    Raises:
        Invalid: If :data:`PORTS` has none.
    """
    text = os.environ.get(PORTS)
    if not text:
        return None
    found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", text.strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < first <= last < 1 << 16:
        raise Invalid(f"{PORTS}={text!r}: expected the first and the last port, such as '20000-20999'")
    return first, last


def _chosen(text: str) -> str:
    """This machine's address that a text names."""
    own = _addresses()
    by_interface = [address for name, address in own if name == text]
    if by_interface:
        return str(by_interface[0])
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        network = None
    for _, address in own:
        if network is not None and address in network:
            return str(address)
    there = ", ".join(f"{name} {address}" for name, address in own)
    raise Invalid(
        f"{ADDRESS}={text!r}: expected an address of this machine ({socket.gethostname()}), a network in which it has "
        f"one, or an interface; it has {there or 'none'}"
    )


def _addresses() -> list[tuple[str, _IPv4 | _IPv6]]:
    """The interfaces of this machine that have an address, each with it; those of IPv4 first."""
    found: list[tuple[str, _IPv4 | _IPv6]] = []
    buffer = array.array("B", bytes(_IFREQ_BYTES * _IFREQS_MAX))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        length, _ = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, asked))
    for at in range(0, length, _IFREQ_BYTES):
        entry = buffer[at : at + _IFREQ_BYTES].tobytes()
        # An address beside the first one of an interface has a label such as eth0:1.
        name = entry[:16].split(b"\0")[0].decode("utf-8", "replace").split(":")[0]
        found.append((name, _IPv4(entry[20:24])))
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return found
    for digits, _, _, scope, _, name in map(str.split, lines):
        if scope != "20":  # that of a link needs its interface, too
            found.append((name, _IPv6(bytes.fromhex(digits))))
    return found


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _route_to(peer: str) -> str | None:
    """This machine's address on the way to ``peer``."""
    if not peer:
        return None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None
