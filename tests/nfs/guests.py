"""Two machines with a client of NFS each, and the server of both: guests of qemu, and nfs-ganesha.

Everything runs in network and mount namespaces of its own and is killed by the kernel when this process ends, however
it ends; bridge, taps and mounts go with the last process in the namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

AT = Path(os.environ.get("SHARDFAST_TEST_GUESTS", "target/guests"))
ROOT = Path(__file__).resolve().parents[2]
JOBS = Path(__file__).with_name("jobs.py")

BUSYBOX = AT / "bin/busybox"
_BELOW_USR = [f"usr/lib/{path}" for path in ("x86_64-linux-gnu", "x86_64-linux-gnu/libnfsidmap", "ganesha")]
LIBRARIES = ":".join(str(AT / path) for path in ("lib/x86_64-linux-gnu", *_BELOW_USR))
PROGRAMS = {**os.environ, "LD_LIBRARY_PATH": LIBRARIES}

SERVER = "10.77.0.1"
PROGRAMS_SERVER = "10.77.0.254"
"""Gives the guests this machine's programs, also while the other server is down."""

SHELL_PORT = 1
NFS_PORT = 2049
BOOT_S_MAX = 120.0
MEMORY_MIB = 768
LEASE_S = 10
"""Clients renew every 5 s at least: a shorter lease could end before."""

PR_SET_PDEATHSIG = 1

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def begin(command: list[Any], **options: Any) -> subprocess.Popen[Any]:
    """Starts a process that ends with this one."""
    return subprocess.Popen([str(word) for word in command], preexec_fn=_end_with_parent, **options)


def wait_until(what: str, holds: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"{what}: not within {seconds} s"
        time.sleep(0.02)


class Namespace:
    """A network with a bridge, and mounts, of their own."""

    def __init__(self) -> None:
        made = "mount -t tmpfs tmpfs /run; ip link set lo up; ip link add br0 type bridge; ip link set br0 up; "
        made += "; ".join(f"ip addr add {address}/24 dev br0" for address in (SERVER, PROGRAMS_SERVER))
        command = ["unshare", "--net", "--mount", "sh", "-euc", f"{made}; echo ready; exec sleep infinity"]
        self._processes: list[subprocess.Popen[Any]] = []
        self._holder = begin(command, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None and self._holder.stdout.readline() == "ready\n"

    def command(self, *words: Any) -> list[Any]:
        """A command that runs there."""
        place = f"/proc/{self._holder.pid}/ns"
        return ["nsenter", f"--net={place}/net", f"--mount={place}/mnt", *words]

    def run(self, *words: Any) -> None:
        subprocess.run([str(word) for word in self.command(*words)], check=True)

    def begin(self, *words: Any, **options: Any) -> subprocess.Popen[Any]:
        """Starts a process there, which ends with the namespace."""
        process = begin(self.command(*words), **options)
        self._processes.append(process)
        return process

    def end(self) -> None:
        for process in (*self._processes, self._holder):
            process.kill()
            process.wait()


class Export(NamedTuple):
    """A directory that the server gives."""

    path: Path
    name: str
    options: str = "Access_Type = RW; Squash = No_Root_Squash;"


class Ganesha:
    """The server: NFS 4 only, with short leases."""

    def __init__(self, namespace: Namespace, address: str, place: Path, exports: list[Export]) -> None:
        self._namespace, self._address, self._place = namespace, address, place
        self.log = place / "ganesha.log"
        (place / "recovery").mkdir(parents=True)
        (place / "idmapd.conf").write_text("[General]\nDomain = test\n[Translation]\nMethod = nsswitch\n")
        self._exports = "".join(
            f"""
                EXPORT {{ Export_Id = {number}; Path = "{export.path}"; Pseudo = "{export.name}"; Protocols = 4;
                    SecType = sys; {export.options} FSAL {{ Name = VFS; }} }}
            """
            for number, export in enumerate(exports, 1)
        )
        self.start(is_again=False)

    def start(self, is_again: bool = True) -> None:
        """Starts it; if again, it gives clients time to say what they had open."""
        place = self._place
        text = f"""
            NFS_CORE_PARAM {{ Protocols = 4; Bind_addr = {self._address}; Enable_UDP = false; Enable_RQUOTA = false;
                Plugins_Dir = "{AT}/usr/lib/x86_64-linux-gnu/ganesha"; }}
            NFSv4 {{ Graceless = {not is_again}; Grace_Period = {LEASE_S}; Lease_Lifetime = {LEASE_S};
                RecoveryBackend = fs; RecoveryRoot = "{place}/recovery"; IdmapConf = "{place}/idmapd.conf";
                Only_Numeric_Owners = true; }}
        """
        (place / "ganesha.conf").write_text(text + self._exports)
        words = [AT / "usr/bin/ganesha.nfsd", "-F", "-f", place / "ganesha.conf", "-L", self.log, "-N", "EVENT"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = self._namespace.begin(*words, "-p", place / "ganesha.pid", env=PROGRAMS, **quiet)
        try:
            wait_until("the server listens", self._listens, 20)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._said()}") from None

    def _listens(self) -> bool:
        assert self._process.poll() is None, f"the server has ended\n{self._said()}"
        net = Path(f"/proc/{self._process.pid}/net")
        listening = f"{socket.inet_aton(self._address)[::-1].hex().upper()}:{NFS_PORT:04X} "
        return any(
            listening in line and " 0A " in line
            for path in (net / "tcp", net / "tcp6")
            for line in path.read_text().splitlines()
        )

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""

    def kill(self) -> None:
        """Stops it at once; what it has answered is on its disk or lost."""
        self._process.kill()
        self._process.wait()


class Ran(NamedTuple):
    """A command's end."""

    code: int
    output: str


class Asked:
    """Something that was sent to a port of a guest, and the answer to come."""

    def __init__(self, guest: Guest, port: int, text: str) -> None:
        self._guest, self._text = guest, text
        self._process = begin(guest.command(BUSYBOX, "nc", guest.address, port), **PIPES)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it says why at its end
            self._process.stdin.write(text)
            self._process.stdin.close()
        self._process.stdin = None

    def is_answered(self) -> bool:
        """Whether an answer is there, or none will come."""
        return self._process.poll() is not None

    def answer(self, timeout_s: float = 60.0) -> str:
        """Waits for the answer, which is empty if the guest does not listen."""
        try:
            return self._process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"not within {timeout_s} s: {self._text}\n{self._guest.console()}") from None

    def ran(self, timeout_s: float = 60.0) -> Ran:
        """Waits for the end of a shell script."""
        output, _, code = self.answer(timeout_s).rpartition("\n")
        assert code, f"no answer: {self._text}\n{output}\n{self._guest.console()}"
        return Ran(int(code), output)

    def outcome(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Waits for what a function of jobs.py returned or raised."""
        answer = self.answer(timeout_s)
        assert answer, f"no answer: {self._text}\n{self._guest.console()}"
        found: dict[str, Any] = json.loads(answer)
        return found

    def value(self, timeout_s: float = 60.0) -> Any:
        """Waits for what a function of jobs.py returned."""
        found = self.outcome(timeout_s)
        assert "value" in found, f"{self._text}: {found}"
        return found["value"]


class Guest:
    """A machine: Linux, with the files of this one, read-only."""

    def __init__(self, namespace: Namespace, place: Path, number: int) -> None:
        self.number, self.address = number, address_of(number)
        self._namespace, self._console = namespace, place / f"guest{number}.log"
        tap = f"tap{number}"
        namespace.run("ip", "tuntap", "add", tap, "mode", "tap")
        namespace.run("ip", "link", "set", tap, "master", "br0", "up")
        (kernel,) = (AT / "boot").glob("vmlinuz-*")
        said = {"name": f"guest{number}", "address": self.address, "server": PROGRAMS_SERVER}
        said |= {"names": ":".join(names_of_host()), "mounts": ":".join(map(str, mounts_of_host()[1:]))}
        line = " ".join(f"guest.{key}={value}" for key, value in said.items())
        command = [
            *(AT / "usr/bin/qemu-system-x86_64", "-L", AT / "usr/share/qemu", "-L", AT / "usr/share/seabios"),
            *("-accel", "tcg", "-cpu", "max", "-m", MEMORY_MIB, "-nodefaults", "-no-user-config", "-no-reboot"),
            *("-display", "none", "-serial", "stdio", "-kernel", kernel, "-initrd", AT / "initramfs.gz"),
            *("-append", f"console=ttyS0 panic=-1 quiet mitigations=off {line}"),
            *("-netdev", f"tap,id=net,ifname={tap},script=no,downscript=no"),
            *("-device", f"virtio-net-pci,netdev=net,romfile=,mac=52:54:00:77:00:{number + 2:02x}"),
        ]
        with self._console.open("wb") as log:
            quiet = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._process = namespace.begin(*command, env=PROGRAMS, **quiet)

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self._process.poll() is None, f"the guest has ended\n{self.console()}"
            return Asked(self, SHELL_PORT, "").answer() != ""

        wait_until(f"guest {self.number} is ready", is_ready, BOOT_S_MAX)

    def console(self) -> str:
        return self._console.read_text(errors="replace")

    def command(self, *words: Any) -> list[Any]:
        """A command that reaches the guest: one here, in its network."""
        return self._namespace.command(*words)

    def begin(self, script: str) -> Asked:
        """Starts a shell script there."""
        return Asked(self, SHELL_PORT, script)

    def run(self, script: str, timeout_s: float = 60.0) -> str:
        """Runs a shell script there, which must succeed; its output."""
        ran = self.begin(script).ran(timeout_s)
        assert ran.code == 0, f"{script}\nends with {ran.code}: {ran.output}\n{self.console()}"
        return ran.output

    def mount(self, export: str, place: str, options: str = "") -> None:
        """Mounts an export with the options that mount.nfs takes unless told others."""
        given = f"vers=4.2,proto=tcp,addr={SERVER},clientaddr={self.address}{options}"
        self.run(f"mkdir -p {place} && {BUSYBOX} mount -t nfs4 -o {given} {SERVER}:{export} {place}")


class Worker:
    """A process of Python in a guest that calls functions of jobs.py: a rank of a job, or a job of its own."""

    def __init__(self, guest: Guest, port: int, ranks: int = 1) -> None:
        self.guest, self._port = guest, port
        variables = {"PYTHONDONTWRITEBYTECODE": 1, "OPENBLAS_NUM_THREADS": 1}
        if ranks > 1:
            variables |= {"RANK": guest.number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": 1}
            variables |= {
                "SHARDFAST_ROOT": f"{address_of(0)}:{port + 1000}",
                "SHARDFAST_TOKEN": f"job{port}",
            }
        words = " ".join(f"{name}='{value}'" for name, value in variables.items())
        self._process = guest.begin(f"{words} exec {sys.executable} {JOBS} {port}")

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert not self._process.is_answered(), self._process.answer()
            return self.begin("is_there", "/").answer() != ""

        wait_until("the worker is ready", is_ready, BOOT_S_MAX)

    def begin(self, name: str, *arguments: Any) -> Asked:
        """Calls a function, and does not wait for it."""
        return Asked(self.guest, self._port, json.dumps([name, arguments]) + "\n")

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a function; what it returns."""
        return self.begin(name, *arguments).value()


def address_of(number: int) -> str:
    """The address of a guest."""
    return f"10.77.0.{number + 2}"


def mounts_of_host() -> list[Path]:
    """The file systems that hold this checkout and its Python, that of `/` first: the server gives each by itself."""

    def mount_of(path: Path) -> Path:
        return next(place for place in (path, *path.parents) if place.is_mount())

    paths = (ROOT, Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable))
    return sorted({Path("/"), *(mount_of(path.resolve()) for path in paths)})


def names_of_host() -> list[str]:
    """The directories and links of `/` that guests have, too; others are their own."""
    own = {"dev", "mnt", "proc", "run", "sys", "tmp"}
    return [path.name for path in Path("/").iterdir() if path.name not in own and path.is_dir() and not path.is_mount()]
