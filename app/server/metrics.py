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

from app.generation.cache_tracker import CacheTracker
from app.generation.latencies import Histogram, Latencies
from app.generation.service import ChatService
from app.generation.token_streams import TokenStreams
from app.server.origin import CLASS_NAMES
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

    def __init__(self, service: ChatService) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(service))

    async def scrape(self, request: Request) -> Response:
        """Return all metrics. Runs on the event loop of the token streams, where the values are written.

        Always in the plain text format: other formats may change the colon in the names.
        """
        return Response(generate_latest(self._registry), media_type=_MEDIA_TYPE)


class _Collector(Collector):
    def __init__(self, service: ChatService) -> None:
        self._model = service.name
        self._streams = service.streams
        self._cache = service.cache

    def describe(self) -> Iterable[Metric]:
        """Return no metrics, so that registering the endpoint does not read from the engine."""
        return ()

    def collect(self) -> Iterator[Metric]:
        streams, state = self._streams, self._streams.state()
        for kind, name, meaning, read in _METRICS:
            yield self._metric(kind, name, meaning, read(state))
        for kind, name, meaning, label, reads in _LABELED_METRICS:
            values = {value: read(state) for value, read in reads.items()}
            yield self._labeled_metric(kind, name, meaning, label, values)
        yield from self._stream_metrics(streams)
        yield from self._latency_metrics(streams.latencies)
        yield from self._cache_metrics(self._cache)

    def _stream_metrics(self, streams: TokenStreams) -> Iterator[Metric]:
        healthy = 0 if streams.problem() else 1
        yield self._metric(GaugeMetricFamily, "healthy", "1 while the engine can serve, else 0.", healthy)
        of_class = streams.running_by_class()
        running = {name: of_class[service] for name, service in CLASS_NAMES.items()}
        name, meaning = "num_requests_running_by_class", "Running requests."
        yield self._labeled_metric(GaugeMetricFamily, name, meaning, "service_class", running)

    def _latency_metrics(self, latencies: Latencies) -> Iterator[Metric]:
        ends = {finish.value: count for finish, count in latencies.ends.items()}
        name, meaning = "request_success", "Ended requests, by finish reason."
        yield self._labeled_metric(CounterMetricFamily, name, meaning, "finished_reason", ends)
        for name, meaning, histograms in (
            (
                "time_to_first_token_seconds",
                "Time from the arrival of a request to its first token.",
                latencies.first_token,
            ),
            ("inter_token_latency_seconds", "Time between consecutive tokens of a request.", latencies.between_tokens),
            (
                "e2e_request_latency_seconds",
                "Time from the arrival of a request to its last token. Aborted requests are not counted.",
                latencies.whole_reply,
            ),
        ):
            yield self._histogram(name, meaning, histograms)

    def _cache_metrics(self, cache: CacheTracker) -> Iterator[Metric]:
        misses = {reason.value: count for reason, count in cache.misses.items()}
        name, meaning = "cache_misses", "Prompts whose prefix was only partly in the cache or not at all, by reason."
        yield self._labeled_metric(CounterMetricFamily, name, meaning, "reason", misses)
        meaning = (
            "Time to restore the cached blocks of a prompt from the host pool and from files, if it has any there."
        )
        yield self._histogram("cache_restore_seconds", meaning, cache.restores)

    def _metric(self, kind: type[Family], name: str, meaning: str, value: float) -> Family:
        family = kind(_PREFIX + name, meaning, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _labeled_metric(
        self, kind: type[Family], name: str, meaning: str, label: str, values: Mapping[str, float]
    ) -> Family:
        family = kind(_PREFIX + name, meaning, labels=("model_name", label))
        for label_value, value in values.items():
            family.add_metric((self._model, label_value), value)
        return family

    def _histogram(
        self, name: str, meaning: str, histograms: Mapping[ServiceClass, Histogram]
    ) -> HistogramMetricFamily:
        family = HistogramMetricFamily(_PREFIX + name, meaning, labels=("model_name", "service_class"))
        for class_name, service in CLASS_NAMES.items():
            histogram = histograms[service]
            bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
            family.add_metric((self._model, class_name), buckets, histogram.total_seconds)
        return family
