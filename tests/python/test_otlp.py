"""Traces and metrics over OTLP, read with OpenTelemetry's own messages."""

import contextlib
import http.server
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import shardfast as sf
import torch
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver:
    """A server that keeps what it is sent.

    Attributes:
        traces, metrics: The requests, in the order in which they came.
        headers: Those of the last request.
    """

    def __init__(self, status=200, kind=None):
        self.traces, self.metrics, self.headers = [], [], {}
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.headers = dict(self.headers)
                if self.path == "/v1/traces":
                    receiver.traces.append(ExportTraceServiceRequest.FromString(body))
                else:
                    assert self.path == "/v1/metrics"
                    receiver.metrics.append(ExportMetricsServiceRequest.FromString(body))
                self.send_response(status)
                if kind:
                    self.send_header("Content-Type", kind)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def spans(self):
        """Each span, with the attributes of its resource."""
        for request in self.traces:
            for resource in request.resource_spans:
                of = {one.key: value(one.value) for one in resource.resource.attributes}
                for scope in resource.scope_spans:
                    assert scope.scope.name == "shardfast"
                    for span in scope.spans:
                        yield span, of


def value(any_value):
    return getattr(any_value, any_value.WhichOneof("value"))


def attributes(span):
    return {one.key: value(one.value) for one in span.attributes}


def saves(rank, world, run, endpoint):
    os.environ.update(
        OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
        OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20abc",
        OTEL_SERVICE_NAME="gpt",
        OTEL_RESOURCE_ATTRIBUTES="team=a",
        OTEL_METRIC_EXPORT_INTERVAL="200",
    )
    torch.manual_seed(7)
    state = {"model": torch.nn.Linear(500, 400), "rank": sf.PerRank(rank)}
    sf.save(f"{run}/step-00000001", state)
    with pytest.raises(sf.Conflict):
        sf.save(f"{run}/step-00000001", state)
    sf.load(f"{run}/step-00000001", state)
    time.sleep(0.5)  # the interval of metrics, twice


def test_ranks_export_one_trace_of_each_operation(ranks, tmp_path):
    run = str(tmp_path / "run")
    with Receiver() as receiver:
        ranks(2)(saves, run, receiver.url)
        assert receiver.headers["authorization"] == "Bearer abc"
        assert receiver.headers["content-type"] == "application/x-protobuf"
    traces = {}
    for span, resource in receiver.spans():
        assert resource["service.name"] == "gpt" and resource["team"] == "a" and resource["shardfast.world"] == 2
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
        traces.setdefault(span.trace_id, []).append((span, resource["shardfast.rank"]))
    assert len(traces) == 3
    names = {}
    for spans in traces.values():
        ids = {span.span_id: span for span, _ in spans}
        assert len(ids) == len(spans)  # of both ranks together
        (root,) = [span for span, _ in spans if not span.parent_span_id]
        assert all(span.parent_span_id in ids for span, _ in spans if span is not root)
        parts = {span.name: rank for span, rank in spans if span.parent_span_id == root.span_id}
        assert parts == {f"{root.name} rank 0": 0, f"{root.name} rank 1": 1}
        names.setdefault(root.name, []).append((root.start_time_unix_nano, root, spans))
    assert {name: len(found) for name, found in names.items()} == {"save 1": 2, "load 1": 1}
    (_, first, spans), (_, second, _) = sorted(names["save 1"], key=lambda found: found[0])
    assert first.status.code == 0 and second.status.code == 2 and "step-00000001" in second.status.message
    assert attributes(first)["shardfast.url"] == f"{run}/step-00000001" and attributes(first)["shardfast.step"] == 1
    assert {"plan", "copy", "write", "agree", "values", "commit"} <= {span.name for span, _ in spans}
    written = sum(attributes(span)["shardfast.bytes"] for span, _ in spans if span.name == "storage write")
    assert written >= 500 * 400 * 4
    objects = {attributes(span)["shardfast.object"] for span, _ in spans if span.name == "storage write"}
    assert any(name.startswith("model/") for name in objects), objects


def test_metrics_are_those_that_are_served(ranks, tmp_path):
    with Receiver() as receiver:
        ranks(2)(saves, str(tmp_path / "run"), receiver.url)
    found = {}
    for request in receiver.metrics:
        (resource,) = request.resource_metrics
        rank = {one.key: value(one.value) for one in resource.resource.attributes}["shardfast.rank"]
        for metric in resource.scope_metrics[0].metrics:
            found[rank, metric.name] = metric
    for rank in (0, 1):
        ended = found[rank, "shardfast_operations_total"].sum
        assert ended.is_monotonic and ended.aggregation_temporality == 2
        counts = {tuple(value(one.value) for one in point.attributes): point.as_double for point in ended.data_points}
        assert counts["save", "succeeded"] == 1 and counts["save", "failed"] == 1 and counts["load", "succeeded"] == 1
        for point in found[rank, "shardfast_storage_seconds"].histogram.data_points:
            assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
            assert point.count == sum(point.bucket_counts) and point.start_time_unix_nano < point.time_unix_nano
        assert found[rank, "shardfast_phase_seconds"].summary.data_points
        assert found[rank, "shardfast_info"].gauge.data_points[0].as_double == 1


ALONE = """
import logging, sys, time, torch, shardfast as sf
logging.basicConfig(level=logging.WARNING, format="%(message)s")
began = time.monotonic()
for step in range(30):
    sf.save(f"{sys.argv[1]}/step-{step:08}", {"model": torch.nn.Linear(4, 4)})
print(time.monotonic() - began)
"""


def run_alone(run, **environment):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(run)],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout), time.monotonic() - began, done.stderr


@contextlib.contextmanager
def deaf():
    """A server that takes connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_receiver_that_is_stalled_or_full_holds_nothing_up(tmp_path):
    with deaf() as port:
        saved, lasted, log = run_alone(tmp_path / "a", OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}")
        # The exporter would wait 10 s for each of 30 saves: half of that is left to a busy machine.
        assert saved < 150 and lasted < saved + 150 and log == ""
    with Receiver(status=503) as receiver:
        _, _, log = run_alone(tmp_path / "b", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url)
        assert log == "" and receiver.traces
    assert len(list((tmp_path / "a").glob("step-*/COMMIT"))) == len(list((tmp_path / "b").glob("step-*/COMMIT"))) == 30


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (200, "text/html; charset=utf-8", "it answered with a page of HTML, which no collector does"),
        (404, None, "it answered 404 Not Found"),
        (401, "text/html", "it answered 401 Unauthorized"),
    ],
)
def test_a_server_that_is_no_collector_is_named_once(status, kind, said, tmp_path):
    with Receiver(status, kind) as receiver:
        _, _, log = run_alone(tmp_path / "run", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url)
    where = f"what is exported over OTLP does not arrive: {receiver.url}/v1/traces"
    assert log.splitlines() == [f"{where}: {said}; no save waits for it or fails"]
    assert len(list((tmp_path / "run").glob("step-*/COMMIT"))) == 30


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://user:hunter2@host"}, "found https"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_EXPORTER_OTLP_HEADERS": "hunter2"}, "key=value"),
    ],
)
def test_variables_that_cannot_be_used_are_named_and_fail_no_save(variables, words, tmp_path):
    _, _, log = run_alone(tmp_path / "run", **variables)
    assert log.startswith("nothing is exported over OTLP: OTEL_") and words in log and "hunter2" not in log
    assert log.count("\n") == 1
