"""Every metric of the server, in one place: name, help, labels, buckets. Nothing here counts.

Label values come from the server's own tables (loaded models, dialects, status kinds, causes), never
from a request: the number of series cannot be driven from outside (hardening C8). A request for an
unknown model counts with the empty model name.
"""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic_ns
from typing import TYPE_CHECKING

from fastserve.metrics import names
from fastserve.metrics.exposition import Metric
from fastserve.metrics.registry import Registry

if TYPE_CHECKING:
    from fastserve._ext.shared_metrics import Counter, Histogram


# 10 us to a minute in steps of 2 to 2.5: fine where a batch is formed, coarse where people wait.
STAGE_SECONDS = (
    1e-05, 2.5e-05, 5e-05, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005,
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip

BATCH_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)

MODEL = ("model", "version")

BY_DIALECT = (*MODEL, "dialect")


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"fastserve_{name}_total", help, "counter", labels)


def _level(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"fastserve_{name}", help, "gauge", labels)


def _fact(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"fastserve_{name}", help, "gauge", labels, combine="last")


def _stage(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"fastserve_{name}_seconds", help, "histogram", labels, STAGE_SECONDS)


# One request, from its last byte read to its reply written.
REQUESTS = _counter(
    "requests", "Requests answered; status OK or the kind of the error.", *BY_DIALECT, "status"
)

REQUEST_DURATION = _stage("request_duration", "From request read to reply written.", *BY_DIALECT)

DECODE_DURATION = _stage("decode_duration", "Reading a request's body into tensors.", *BY_DIALECT)

QUEUE_DURATION = _stage("queue_duration", "From rows in a batch to a worker taking the batch.", *MODEL)

BATCH_FORM_DURATION = _stage("batch_form_duration", "From a batch's first row to its sealing.", *MODEL)

COPY_IN_DURATION = _stage("copy_in_duration", "From a worker taking a batch to its model beginning.", *MODEL)

COMPUTE_DURATION = _stage("compute_duration", "A model running one batch.", *MODEL)

COPY_OUT_DURATION = _stage("copy_out_duration", "From the model's end to the batch being answered.", *MODEL)

ENCODE_DURATION = _stage("encode_duration", "Writing a reply's body from output rows.", *BY_DIALECT)

# Batches and queues.
BATCH_SIZE = Metric("fastserve_batch_rows", "Rows in a batch as run.", "histogram", MODEL, BATCH_ROWS)

BATCHES = _counter("batches", "Batches run, by what sealed them: full, due or idle.", *MODEL, "sealed")

ROWS = _counter("rows", "Rows run.", *MODEL)

PADDING_ROWS = _counter(
    "padding_rows", "Rows run that belong to nobody: abandoned, cancelled or padding.", *MODEL
)

QUEUE_ROWS = _fact("queue_rows", "Rows waiting for a worker, as of the last half second.", *MODEL)

QUEUE_SECONDS = _fact(
    "queue_seconds", "How long those rows take at the measured rate; 0: nothing waits.", *MODEL
)

REJECTS = _counter("rejects", "Requests turned away before they ran, by cause.", *MODEL, "cause")

CANCELS = _counter(
    "cancels", "Requests whose client left, by where they were: queued or running.", *MODEL, "stage"
)

RETRIES = _counter("retries", "Batches given to another worker because theirs died.", *MODEL)

DEVICE_BATCHES = _counter("device_batches", "Batches that went over a GPU.", *MODEL)

DEVICE_OUT_OF_MEMORY = _counter(
    "device_out_of_memory", "Batches there was no memory for, a GPU's or the host's.", *MODEL
)

DEVICE_STAGED = _level("device_staged", "Workers whose batches go through a staging buffer.", *MODEL)

# Text generation: sequences and their tokens.
TEXT_FIRST_TOKEN = _stage("text_first_token", "From a request's arrival to its first token.", *MODEL)

TEXT_TOKEN_GAP = _stage("text_token_gap", "From one token of a sequence to the next.", *MODEL)

TEXT_PROMPT_TOKENS = _counter("text_prompt_tokens", "Tokens of the prompts of sequences begun.", *MODEL)

TEXT_TOKENS = _counter("text_tokens", "Tokens generated.", *MODEL)

TEXT_DRAFTED_TOKENS = _counter(
    "text_drafted_tokens", "Tokens drafted by prompt look-up and computed in advance.", *MODEL
)

TEXT_ACCEPTED_TOKENS = _counter(
    "text_accepted_tokens", "Drafted tokens that became tokens of the answer.", *MODEL
)

TEXT_SEQUENCES = _counter("text_sequences", "Sequences ended, by how.", *MODEL, "finish")

TEXT_RUNNING = _level("text_running", "Sequences that have had a token and go on.", *MODEL)

TEXT_WAITING = _level("text_waiting", "Sequences that have had no token yet.", *MODEL)

TEXT_KV_USED = _level("text_kv_used_tokens", "Tokens of running sequences, prompts included.", *MODEL)

TEXT_KV = _fact("text_kv_tokens", "Tokens that the KV caches of all workers hold; 0: not told.", *MODEL)

# Models and their workers. One process owns them and reports.
WORKERS_ALIVE = _fact("workers_alive", "Worker processes ready to run.", *MODEL)

WORKERS_WANTED = _fact("workers_wanted", "Worker processes configured.", *MODEL)

REMOTE_WORKERS = _fact("remote_workers", "Remote workers ready to run, by their machine.", *MODEL, "node")

REMOTE_WORKERS_WANTED = _fact(
    "remote_workers_wanted", "Workers that a version is to have on Ray, by its load.", *MODEL
)
REMOTE_BATCHES = _counter(
    "remote_batches", "Batches run by remote workers, by their machine.", *MODEL, "node"
)

SHARED_WORKERS = _fact(
    "shared_worker_tenants", "Workers of models in each process that models share.", "worker"
)

WORKER_MEMORY = _fact(
    "worker_memory_bytes",
    "Resident memory of a worker process without files and shared memory, as of the last seconds.",
    *MODEL,
    "worker",
)

WORKER_RESTARTS = _counter("worker_restarts", "Worker processes started again after one died.", *MODEL)

MODEL_READY = _fact("model_ready", "1 when the version is available and has a live worker.", *MODEL)

MODEL_LOADS = _counter("model_loads", "Loads of model versions, by result: ok or failed.", *MODEL, "result")

MODEL_EVICTIONS = _counter("model_evictions", "Models unloaded to make room in memory_budget.", "model")

MODELS_MEMORY = _fact("models_memory_bytes", "Memory of all models' workers: used, and the budget.", "state")

LOAD_WAITING = _fact("load_waiting", "Requests that wait for their models to be loaded.")

# Connections; listener is http.
CONNECTIONS = _level("connections", "Connections open.", "listener")

WIRE_REJECTS = _counter(
    "wire_rejects", "Calls refused before any dialect saw them, by cause.", "listener", "cause"
)

# Memory for requests and replies; state is used or limit.
MEMORY = _level("memory_bytes", "Bytes of requests and unread replies, and what they may be.", "state")

MEMORY_WAITING = _level("memory_waiting", "Requests that wait for memory.")

MEMORY_REFUSED = _counter("memory_refused", "Requests refused since there was no memory for them.")

# The server itself.
READY = _fact("ready", "1 when /healthz/ready answers 200.")

BUILD = _fact("build_info", "1, labelled with the version of the server.", "version")

TLS_EXPIRES = _fact(
    "tls_certificate_expires_seconds", "Unix time at which the first certificate of the served chain ends."
)

API_KEYS = _fact("api_keys", "API keys in force: in the file of `keys`, and not expired.")

API_KEYS_STALE = _fact(
    "api_keys_stale", "1 while the file of `keys` cannot be used, and the keys of before stay in force."
)

# The names of keys are the operator's.
KEY_REQUESTS = _counter("key_requests", "Requests of an API key, whatever they are answered.", "key")

KEY_ROWS = _counter(
    "key_rows", "Rows that models ran for an API key; an ensemble's count at each step.", "key"
)

KEY_TOKENS = _counter("key_tokens", "Tokens of an API key: of prompts and of answers.", "key")

KEY_COMPUTE = _counter(
    "key_compute_seconds", "Compute of an API key: the time of each batch, by its rows of the batch.", "key"
)

KEY_ERRORS = _counter(
    "key_errors", "Those with an error, by HTTP status or gRPC's; no key: none that is valid.", "key", "code"
)

STORAGE_LOOKS = _counter(
    "storage_looks",
    "Looks at the repository's object store, by result: changed, unchanged, failed.",
    "result",
)

STORAGE_STALE = _fact(
    "storage_stale", "1 while the object store cannot be read, and what was fetched before stays served."
)

STORAGE_SYNCED = _fact(
    "storage_synced_seconds", "Unix time of the last look at the object store that succeeded; 0: none."
)

STORAGE_BYTES = _fact("storage_bytes", "Bytes of the files that are served out of the object store.")

REQUEST_LOG = _counter(
    "request_log_lines",
    "Requests drawn for a model's log, by result: written, dropped, failed.",
    "model",
    "result",
)

SHADOW_REQUESTS = _counter(
    "shadow_requests",
    "Copies of requests for a shadow version, by result: equal, different, failed, dropped.",
    "model",
    "version",
    "result",
)

TRACED_REQUESTS = _counter("traced_requests", "Requests whose spans were handed to the exporter of traces.")

TRACE_SPANS_LOST = _counter("trace_spans_lost", "Spans that no collector got, by cause.", "cause")

LOOP_DELAY = _stage("loop_delay", "How late a timer of the event loop fired.")

FRONT_RESTARTS = _counter("front_restarts", "Front processes started again after one died.")

CATALOGUE: dict[str, Metric] = {
    metric.name: metric for metric in list(globals().values()) if isinstance(metric, Metric)
}

# Front processes themselves, for dialects' own pages: /metrics leaves them out.
FRONT_CPU_US = Metric("_front_cpu_us", "CPU time of front processes.", "counter")

FRONT_RESIDENT = Metric("_front_resident_bytes", "Resident memory of front processes.", "gauge")

# The values `cause`, `stage`, `sealed` and `result` may have; other texts are a mistake in the server.
REJECT_CAUSES = ("queue_rows", "queue_bytes", "deadline", "draining", "no_worker", "too_large", "invalid")

FINISHES = ("none", "eos", "length", "stop", "cancelled", "timeout", "failed")  # by codec.text.Finish

CANCEL_STAGES = ("queued", "running")

SEAL_CAUSES = ("full", "due", "idle")

REQUEST_LOG_RESULTS = ("written", "dropped", "failed")

SHADOW_RESULTS = ("equal", "different", "failed", "dropped")

STORAGE_RESULTS = ("changed", "unchanged", "failed")


class Traffic:
    """The request meters of a dialect.

    Names of models that are not served count as the empty model, so that clients cannot add series.
    """

    def __init__(self, registry: Registry, dialect: str, known: Collection[str]) -> None:
        self._registry = registry
        self._dialect = dialect
        self._known = known
        self.accounted = False
        """Whether requests have accounts: those of their API keys."""
        self._kept: dict[tuple[str, object], tuple[Counter, Histogram]] = {}  # as many as versions served

    def succeeded(self, model: str, version: object) -> tuple[Counter, Histogram]:
        """Return the meters of requests answered well."""
        found = self._kept.get((model, version))
        if found is None:
            who = (model, version, self._dialect)
            requests = self._registry.counters(names.REQUESTS).of(*who, "OK")
            found = requests, self._registry.histograms(names.REQUEST_DURATION).of(*who)
            self._kept[model, version] = found
        return found

    def stages(self, model: str, version: object) -> tuple[Histogram, Histogram]:
        """Return the meters of reading bodies and of writing them."""
        who = (model, version, self._dialect)
        decode = self._registry.histograms(names.DECODE_DURATION).of(*who)
        return decode, self._registry.histograms(names.ENCODE_DURATION).of(*who)

    def count(self, model: str, version: object, took_ns: int) -> None:
        """Count one request answered well."""
        requests, duration = self.succeeded(model, version)
        requests.add()
        duration.observe_ns(took_ns)

    def answered(self, model: str, version: object, received_ns: int) -> int:
        """Count one answered well that came at `received_ns`, and return its duration in ns."""
        took_ns = monotonic_ns() - received_ns
        self.count(model, version, took_ns)
        return took_ns

    def refused(
        self, model: str, kind: str, version: object = "", *, message: str = "", exchange: object = None
    ) -> None:
        """Count one request answered with an error of that kind; `version` where it had reached one.

        `message` is the client's error text, `exchange` the request.
        """
        known = model if version or model in self._known else ""
        if known and message:
            request_id, address = (str(getattr(exchange, name, "")) for name in ("request_id", "address"))
            self._registry.failures.add(known, kind, message, request_id, address)
        self._registry.counters(names.REQUESTS).of(known, version, self._dialect, kind).add()
