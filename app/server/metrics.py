"""`GET /metrics`: counters and state of the engine, and latencies of replies, in Prometheus' text format.

A metric that vLLM also has keeps vLLM's name, with another prefix. To use a dashboard made for vLLM, change the prefix.
Values are read during the scrape; nothing is stored here, and no scrape waits for the engine.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from app.generation.latencies import Histogram, Latencies
from app.generation.service import ChatService
from app.models.residency.resident import Reason, State
from app.server.origin import CLASS_NAMES
from app.server.served_models import ServedModels
from engine.counters import EngineState
from engine.draft import Source
from engine.request import ServiceClass

_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "ingle:"

Family: TypeAlias = GaugeMetricFamily | CounterMetricFamily
ReadState: TypeAlias = Callable[[EngineState], float]

# Type, name, help text, and how to read the value.
_METRICS: Sequence[tuple[type[Family], str, str, ReadState]] = (
    (GaugeMetricFamily, "num_requests_running", "Running requests.", lambda state: state.running),
    (GaugeMetricFamily, "num_requests_waiting", "Requests that wait for a slot.", lambda state: sum(state.waiting)),
    (
        GaugeMetricFamily,
        "num_requests_swapped",
        "Waiting requests whose blocks are in the host pool.",
        lambda state: state.swapped,
    ),
    (
        GaugeMetricFamily,
        "kv_cache_usage_perc",
        "Fraction of the KV blocks that requests hold, from 0 to 1.",
        lambda state: state.kv_blocks_held / max(1, state.kv_blocks),
    ),
    (GaugeMetricFamily, "kv_blocks", "KV blocks in total.", lambda state: state.kv_blocks),
    (GaugeMetricFamily, "kv_blocks_held", "KV blocks that requests hold.", lambda state: state.kv_blocks_held),
    (
        GaugeMetricFamily,
        "kv_blocks_cached",
        "Cached KV blocks that no request holds.",
        lambda state: state.kv_blocks_cached,
    ),
    (GaugeMetricFamily, "host_pool_blocks", "Blocks in the host pool.", lambda state: state.host_blocks),
    (
        GaugeMetricFamily,
        "host_pool_blocks_used",
        "Used blocks in the host pool.",
        lambda state: state.host_blocks_used,
    ),
    (
        CounterMetricFamily,
        "prompt_tokens",
        "Prompt tokens of admitted requests.",
        lambda state: state.counters.prompt_tokens,
    ),
    (
        CounterMetricFamily,
        "generation_tokens",
        "Generated tokens.",
        lambda state: state.counters.generated_tokens,
    ),
    (
        CounterMetricFamily,
        "prefix_cache_queries",
        "Prompt tokens looked up in the cache.",
        lambda state: state.counters.prompt_tokens,
    ),
    (
        CounterMetricFamily,
        "prefix_cache_hits",
        "Prompt tokens found in the cache.",
        lambda state: state.counters.prompts.cached,
    ),
    (
        CounterMetricFamily,
        "num_preemptions",
        "Preemptions.",
        lambda state: state.counters.swapped_out + state.counters.recomputed,
    ),
    (
        CounterMetricFamily,
        "failed_steps",
        "Failed steps. Each ends the requests that it ran.",
        lambda state: state.counters.failed_steps,
    ),
    (
        CounterMetricFamily,
        "failed_graph_captures",
        "Failed captures of CUDA graphs. Steps without a graph are slower.",
        lambda state: state.failed_captures,
    ),
    (
        CounterMetricFamily,
        "disk_read_bytes",
        "Bytes of KV blocks read from files.",
        lambda state: state.counters.disk_read_bytes,
    ),
    (
        CounterMetricFamily,
        "disk_written_bytes",
        "Bytes of KV blocks written to files.",
        lambda state: state.counters.disk_written_bytes,
    ),
    (
        CounterMetricFamily,
        "disk_misses",
        "Failed reads of KV blocks from files. Their tokens were recomputed.",
        lambda state: state.counters.disk_misses,
    ),
)


def _drafted(state: EngineState, source: Source) -> int:
    return state.counters.drafts[source].drafted


def _accepted(state: EngineState, source: Source) -> int:
    return state.counters.drafts[source].accepted


# Type, name, help text, name of the label, and how to read the value of each label.
_LABELED_METRICS: Sequence[tuple[type[Family], str, str, str, Mapping[str, ReadState]]] = (
    (
        GaugeMetricFamily,
        "num_requests_waiting_by_class",
        "Requests that wait for a slot.",
        "service_class",
        {name: partial(EngineState.waiting_in, service=service) for name, service in CLASS_NAMES.items()},
    ),
    (
        CounterMetricFamily,
        "num_preemptions_by_kind",
        "Preemptions by kind: swap copied the blocks to RAM, recompute dropped them.",
        "kind",
        {"swap": lambda state: state.counters.swapped_out, "recompute": lambda state: state.counters.recomputed},
    ),
    (
        CounterMetricFamily,
        "tokens_by_source",
        "Cached prompt tokens by cache tier, and computed tokens of prompts and replies.",
        "source",
        {
            "device": lambda state: state.counters.prompts.device,
            "host": lambda state: state.counters.prompts.host,
            "disk": lambda state: state.counters.prompts.disk,
            "computed": lambda state: state.counters.computed_tokens,
        },
    ),
    (
        CounterMetricFamily,
        "draft_tokens",
        "Drafted tokens that steps verified, by the source of the draft.",
        "source",
        {source.value: partial(_drafted, source=source) for source in Source},
    ),
    (
        CounterMetricFamily,
        "accepted_tokens",
        "Drafted tokens that turned out right, by the source of the draft.",
        "source",
        {source.value: partial(_accepted, source=source) for source in Source},
    ),
)


class Metrics:
    """The endpoint of GET /metrics."""

    def __init__(self, models: ServedModels) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(models))

    async def scrape(self, request: Request) -> Response:
        """Return all metrics. Runs on the event loop of the token streams, where the values are written.

        Always in the plain text format: other formats may change the colon in the names.
        """
        return Response(generate_latest(self._registry), media_type=_MEDIA_TYPE)


class _Collector(Collector):
    """Collects the metrics of all models, with the name of the model as a label."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def describe(self) -> Iterable[Metric]:
        """Return no metrics, so that registering the endpoint does not read from the engine."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._model_metrics()
        services = self._services()
        states = [(service.name, service.streams.state()) for service in services]
        for kind, name, meaning, read in _METRICS:
            yield _metric(kind, name, meaning, {model: read(state) for model, state in states})
        for kind, name, meaning, label, reads in _LABELED_METRICS:
            values = {(model, value): read(state) for model, state in states for value, read in reads.items()}
            yield _labeled_metric(kind, name, meaning, label, values)
        yield from _stream_metrics(services)
        yield from _latency_metrics(services)
        yield from _cache_metrics(services)

    def _services(self) -> list[ChatService]:
        loaded = (resident.loaded for resident in self._models.residents)
        services = (model.service for model in loaded if model is not None)
        return [service for service in services if isinstance(service, ChatService)]

    def _model_metrics(self) -> Iterator[Metric]:
        residents = self._models.residents
        states = {(model.title, state.value): float(model.state is state) for model in residents for state in State}
        yield _labeled_metric(
            GaugeMetricFamily, "model_state", "1 for the current state of each model, else 0.", "state", states
        )
        family = GaugeMetricFamily(
            _PREFIX + "memory_bytes",
            "Bytes that each model may use, by purpose and memory.",
            labels=("model_name", "what", "where"),
        )
        for model in residents:
            for where, held in model.memories().items():
                for what in ("weights", "steps", "cache", "host_pool", "touched", "tokenizer"):
                    family.add_metric((model.title, what, where), getattr(held, what))
            for where, unfreed in model.unfreed.items():
                family.add_metric((model.title, "unfreed", where), unfreed.num_bytes)
        yield family
        loads = {model.title: float(model.loads) for model in residents}
        yield _metric(CounterMetricFamily, "loads", "Loads of each model.", loads)
        failed = {model.title: float(model.failed_loads) for model in residents}
        yield _metric(CounterMetricFamily, "failed_loads", "Loads that failed.", failed)
        unloads = {(model.title, why.value): float(model.unloads[why]) for model in residents for why in Reason}
        meaning = "Unloads by reason: memory for another model, idle, request, or failure of the engine."
        yield _labeled_metric(CounterMetricFamily, "unloads", meaning, "reason", unloads)


def _stream_metrics(services: Sequence[ChatService]) -> Iterator[Metric]:
    healthy = {service.name: 0.0 if service.streams.problem() else 1.0 for service in services}
    yield _metric(GaugeMetricFamily, "healthy", "1 while the engine can serve, else 0.", healthy)
    running = {
        (service.name, name): float(service.streams.running_by_class()[of_class])
        for service in services
        for name, of_class in CLASS_NAMES.items()
    }
    name, meaning = "num_requests_running_by_class", "Running requests."
    yield _labeled_metric(GaugeMetricFamily, name, meaning, "service_class", running)


def _latency_metrics(services: Sequence[ChatService]) -> Iterator[Metric]:
    ends = {
        (service.name, finish.value): float(count)
        for service in services
        for finish, count in service.streams.latencies.ends.items()
    }
    name, meaning = "request_success", "Ended requests, by finish reason."
    yield _labeled_metric(CounterMetricFamily, name, meaning, "finished_reason", ends)
    latencies = {service.name: service.streams.latencies for service in services}
    for name, meaning, read in _LATENCIES:
        yield _histogram(name, meaning, {model: read(measured) for model, measured in latencies.items()})


_LATENCIES: Sequence[tuple[str, str, Callable[[Latencies], Mapping[ServiceClass, Histogram]]]] = (
    (
        "time_to_first_token_seconds",
        "Time from the arrival of a request to its first token.",
        lambda latencies: latencies.first_token,
    ),
    (
        "inter_token_latency_seconds",
        "Time between consecutive tokens of a request.",
        lambda latencies: latencies.between_tokens,
    ),
    (
        "e2e_request_latency_seconds",
        "Time from the arrival of a request to its last token. Aborted requests are not counted.",
        lambda latencies: latencies.whole_reply,
    ),
)


def _cache_metrics(services: Sequence[ChatService]) -> Iterator[Metric]:
    misses = {
        (service.name, reason.value): float(count)
        for service in services
        for reason, count in service.cache.misses.items()
    }
    name, meaning = "cache_misses", "Prompts whose prefix was only partly in the cache or not at all, by reason."
    yield _labeled_metric(CounterMetricFamily, name, meaning, "reason", misses)
    meaning = "Time to restore the cached blocks of a prompt from the host pool and from files, if it has any there."
    yield _histogram("cache_restore_seconds", meaning, {service.name: service.cache.restores for service in services})


def _metric(kind: type[Family], name: str, meaning: str, values: Mapping[str, float]) -> Family:
    """Return a metric with a value for each model."""
    family = kind(_PREFIX + name, meaning, labels=("model_name",))
    for model, value in values.items():
        family.add_metric((model,), value)
    return family


def _labeled_metric(
    kind: type[Family], name: str, meaning: str, label: str, values: Mapping[tuple[str, str], float]
) -> Family:
    """Return a metric with a value for each model and each value of the label."""
    family = kind(_PREFIX + name, meaning, labels=("model_name", label))
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _histogram(
    name: str, meaning: str, histograms: Mapping[str, Mapping[ServiceClass, Histogram]]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(_PREFIX + name, meaning, labels=("model_name", "service_class"))
    for model, by_class in histograms.items():
        for class_name, service in CLASS_NAMES.items():
            histogram = by_class[service]
            bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
            family.add_metric((model, class_name), buckets, histogram.total_seconds)
    return family
