"""A cluster without nodes: etcd, the API server, and the controllers of jobs, of JobSet and of Kubeflow Trainer.

All are as published, with the admission webhooks that they bring. Tests say how pods end, where kubelets would.
"""

import json
import os
import re
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import yaml
from ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "kubernetes"
PROGRAMS = ROOT / "target" / "kubernetes"

TOKEN = "token"
START_S = 120.0
LOOK_S = 0.05

# Where objects of a kind are.
RESOURCES = {
    "Namespace": "namespaces",
    "Pod": "pods",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Job": "jobs",
    "JobSet": "jobsets",
    "TrainingRuntime": "trainingruntimes",
    "TrainJob": "trainjobs",
    "CustomResourceDefinition": "customresourcedefinitions",
    "MutatingWebhookConfiguration": "mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": "validatingwebhookconfigurations",
}


class Refused(Exception):
    """The server refuses a request, with its message."""


def manifest(name: str) -> list[dict]:
    """The objects of an example, in the order of their file."""
    return [*yaml.safe_load_all((EXAMPLE / f"{name}.yaml").read_text())]


def module(name: str, programs: str) -> Path:
    """The directory of a Go module, at the version that these programs were built from."""
    command = ["go", "list", "-C", str(Path(__file__).parent / programs), "-m", "-f", "{{.Dir}}", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def wait_for(what: str, found: Callable[[], Any]) -> Any:
    """Returns what is found as soon as it is true."""
    until = time.monotonic() + START_S
    while not (value := found()):
        assert time.monotonic() < until, f"{what}: not within {START_S:g} s"
        time.sleep(LOOK_S)
    return value


class Cluster:
    """Programs that run below a directory, and requests to their API server."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.port = free_ports(6)
        self._ends = ExitStack()
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def __enter__(self) -> Self:
        with ExitStack() as ends:
            self._ends = ends
            self._write_files()
            self._start_server()
            self._start_controllers()
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def _write_files(self) -> None:
        """Keys, a certificate for the webhooks, and what tells controllers where the server is."""
        openssl = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=webhooks"]
        certificates = self.place / "k8s-webhook-server" / "serving-certs"  # below TMPDIR, where controllers look
        certificates.mkdir(parents=True)
        files = ["-keyout", str(certificates / "tls.key"), "-out", str(certificates / "tls.crt")]
        subprocess.run([*openssl, "-addext", "subjectAltName=IP:127.0.0.1", *files], check=True, capture_output=True)
        self.authority = b64encode((certificates / "tls.crt").read_bytes()).decode()
        self.key = certificates / "tls.key"
        (self.place / "tokens.csv").write_text(f'{TOKEN},tests,1,"system:masters"\n')
        of_one = {
            "clusters": {"cluster": {"server": f"https://127.0.0.1:{self.port}", "insecure-skip-tls-verify": True}},
            "users": {"user": {"token": TOKEN}},
            "contexts": {"context": {"cluster": "tests", "user": "tests"}},
        }
        named = {name: [{"name": "tests", **one}] for name, one in of_one.items()}
        (self.place / "kubeconfig").write_text(yaml.safe_dump({"current-context": "tests", **named}))
        # JobSet's and Trainer's files name these settings alike.
        for number, group in enumerate(("config.jobset.x-k8s.io", "config.trainer.kubeflow.org")):
            settings = {
                "apiVersion": f"{group}/v1alpha1",
                "kind": "Configuration",
                "webhook": {"port": self.port + 3 + number, "host": "127.0.0.1"},
                "leaderElection": {"leaderElect": False},
                "metrics": {"bindAddress": "0"},
                "health": {"healthProbeBindAddress": "0"},
                ("certManagement" if number else "internalCertManagement"): {"enable": False},
            }
            (self.place / f"{group}.yaml").write_text(yaml.safe_dump(settings))

    def start(self, program: str, *arguments: str) -> None:
        """Starts a program, which ends with this cluster."""
        variables = {"TMPDIR": str(self.place), "KUBECONFIG": str(self.place / "kubeconfig"), "NO_PROXY": "127.0.0.1"}
        with (self.place / f"{program}.log").open("wb") as log:
            process = subprocess.Popen(
                [PROGRAMS / program, *arguments],
                cwd=self.place,
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
            )
        self._ends.callback(process.wait)
        self._ends.callback(process.kill)

    def _start_server(self) -> None:
        store, key = f"http://127.0.0.1:{self.port + 1}", str(self.key)
        peers = f"http://127.0.0.1:{self.port + 2}"
        addresses = (f"--listen-client-urls={store}", f"--advertise-client-urls={store}", f"--listen-peer-urls={peers}")
        self.start("etcd", "--data-dir=etcd", "--unsafe-no-fsync", *addresses)
        self.start(
            "kube-apiserver",
            f"--etcd-servers={store}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            "--cert-dir=certificates",
            "--service-account-issuer=https://kubernetes.default",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--token-auth-file=tokens.csv",
            "--authorization-mode=AlwaysAllow",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--disable-admission-plugins=ServiceAccount",  # it waits for accounts that no controller makes here
        )
        wait_for("the API server", self._is_ready)

    def _is_ready(self) -> bool:
        try:
            self.request("GET", "/readyz")
        except (OSError, Refused):
            return False
        return True

    def _start_controllers(self) -> None:
        jobset = module("sigs.k8s.io/jobset", "programs/jobset")
        trainer = module("github.com/kubeflow/trainer/v2", "programs")
        definitions = (
            *sorted((jobset / "config/components/crd/bases").glob("*.yaml")),
            *sorted((trainer / "manifests/base/crds").glob("trainer.*.yaml")),
        )
        for path in definitions:
            name = self.create(yaml.safe_load(path.read_text()), strict=False)["metadata"]["name"]
            wait_for(name, lambda name=name: self._is_established(name))
        kubeconfig = f"--kubeconfig={self.place / 'kubeconfig'}"
        only = "--controllers=job-controller,garbage-collector-controller"
        self.start("kube-controller-manager", kubeconfig, only, "--leader-elect=false", "--secure-port=0")
        self.start("jobset", "--config=config.jobset.x-k8s.io.yaml")
        self.start("trainer-controller-manager", "--config=config.trainer.kubeflow.org.yaml")
        for number, folder in enumerate((jobset / "config/components/webhook", trainer / "manifests/base/webhook")):
            for one in yaml.safe_load_all((folder / "manifests.yaml").read_text()):
                one["metadata"]["name"] = f"{one['metadata']['name']}-{number}"
                for hook in one["webhooks"]:
                    path = hook["clientConfig"]["service"]["path"]
                    url = f"https://127.0.0.1:{self.port + 3 + number}{path}"
                    hook["clientConfig"] = {"url": url, "caBundle": self.authority}
                self.create(one)
        wait_for("the webhooks", self._are_answering)

    def _is_established(self, name: str) -> bool:
        one = self.request("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")
        return condition(one, "Established")

    def _are_answering(self) -> bool:
        """Whether requests that webhooks must see are answered."""
        try:
            for name in ("jobset-pvc", "trainjob-pvc"):
                self.create(manifest(name)[1], dry_run=True)
        except Refused as refused:
            if "failed calling webhook" in str(refused) or "could not find the requested resource" in str(refused):
                return False
            raise
        return True

    def request(self, method: str, path: str, body: object = None, kind: str = "application/json") -> dict:
        """Sends a request, and returns the answer.

        Raises:
            Refused: The server does not do it.
        """
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"https://127.0.0.1:{self.port}{path}", data, headers, method=method)
        try:
            with self._opener.open(request, timeout=30) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            raise Refused(error.read().decode()) from None
        return json.loads(text) if text.startswith("{") else {}

    def path(self, kind: str, version: str, namespace: str | None = None, name: str = "") -> str:
        root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
        inside = "" if namespace is None else f"/namespaces/{namespace}"
        return f"{root}{inside}/{RESOURCES[kind]}" + (f"/{name}" if name else "")

    def create(self, one: dict, namespace: str | None = None, *, dry_run: bool = False, strict: bool = True) -> dict:
        """Creates an object, or asks whether the server would. With ``strict`` no field may be unknown."""
        is_global = one["kind"] in ("Namespace", "CustomResourceDefinition") or one["kind"].endswith("Configuration")
        place = None if is_global else namespace or "default"
        path = self.path(one["kind"], one["apiVersion"], place)
        options = f"?fieldValidation={'Strict' if strict else 'Ignore'}" + ("&dryRun=All" if dry_run else "")
        return self.request("POST", path + options, one)

    def namespace(self, name: str) -> str:
        """Makes a namespace, named after a test."""
        short = re.sub(r"[^a-z0-9]+", "-", name.lower())[-40:].strip("-")
        return self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": short}})["metadata"]["name"]

    def get(self, kind: str, version: str, namespace: str, name: str) -> dict:
        return self.request("GET", self.path(kind, version, namespace, name))

    def every(self, kind: str, version: str, namespace: str) -> list[dict]:
        return self.request("GET", self.path(kind, version, namespace))["items"]

    def pods(self, namespace: str, count: int, beside: Iterable[str] = ()) -> list[dict]:
        """Waits for so many pods that have not ended, with other ids than ``beside``, and returns them by index."""
        old = {*beside}

        def running() -> list[dict]:
            found = [
                pod
                for pod in self.every("Pod", "v1", namespace)
                if pod["metadata"]["uid"] not in old
                and "deletionTimestamp" not in pod["metadata"]
                and pod["status"].get("phase") == "Pending"
            ]
            return found if len(found) == count else []

        index = "batch.kubernetes.io/job-completion-index"
        return sorted(wait_for("pods", running), key=lambda pod: int(pod["metadata"]["labels"][index]))

    def end(self, pod: dict, status: int, *, is_disrupted: bool = False) -> None:
        """Says that a pod's container has ended with this status, as a kubelet would."""
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        container = {
            "name": pod["spec"]["containers"][0]["name"],
            "image": "image",
            "imageID": "",
            "ready": False,
            "restartCount": 0,
            "state": {"terminated": {"exitCode": status, "reason": "Error" if status else "Completed"}},
        }
        disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        patch = {
            "phase": "Failed" if status else "Succeeded",
            "containerStatuses": [container],
            "conditions": [disrupted] if is_disrupted else [],
        }
        path = self.path("Pod", "v1", namespace, name)
        self.request("PATCH", f"{path}/status", {"status": patch}, "application/merge-patch+json")


def condition(one: dict, kind: str) -> bool:
    """Whether a condition of this object holds."""
    conditions = one.get("status", {}).get("conditions") or ()
    return any(found["type"] == kind and found["status"] == "True" for found in conditions)
