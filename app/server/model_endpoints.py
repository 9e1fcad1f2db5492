"""Routes of this server's own API about models: their states and memory, loads with their progress, and unloads.

Replies name models as requests do. They contain no paths and no addresses.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from itertools import starmap
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from app.generation.generic_tools import ToolSupport
from app.models.details import Kind
from app.models.residency.advice import Advice
from app.models.residency.ledger import Bytes, Ledger
from app.models.residency.resident import Resident, State
from app.progress import Unit
from app.server.dialects.openai.errors import error_body
from app.server.http.endpoint import LINES, Endpoint
from app.server.http.errors import InvalidRequest, client_message, without_folders
from app.server.http.reply import StreamedReply, json_reply
from app.server.http.request_body import read_body
from app.server.request_fields import KeepAlive, ModelName
from app.server.served_models import LoadedModel, ModelDescription, ServedModels

POLL_SECONDS = 0.1  # seconds between two lines about a load, at least


class MemoryUse(Struct):
    """The bytes that a model may use of one memory."""

    weights: int
    steps: int
    cache: int
    host_pool: int
    touched: int  # bytes of `cache` and `host_pool` that have been written
    tokenizer: int

    @classmethod
    def of(cls, held: Bytes) -> "MemoryUse":
        return cls(held.weights, held.steps, held.cache, held.host_pool, held.touched, held.tokenizer)


class ModelReport(Struct, kw_only=True):
    """One model of the server."""

    name: str
    names: list[str]  # all names that requests may use
    kind: Kind
    state: State
    stage: str | None  # what the load does now; null: the model is not loading
    progress: float | None  # share of the stage that is done, from 0 to 1
    pinned: bool
    expires_in: float | None  # seconds until the model is unloaded if no request uses it; null: it stays loaded
    load_seconds: float | None  # duration of the last load; null: not measured
    problem: str | None  # why the model could not be loaded
    context_length: int
    tools: ToolSupport  # how tools are presented to it
    size: int  # bytes of its files
    stored: bool  # false: its files were removed; it may still be loaded
    memory: dict[str, MemoryUse]  # keyed by "host" or the name of a GPU; empty: the model is not loaded
    parked: int  # bytes of the KV cache that stays in memory after an unload


class MemoryReport(Struct):
    """One memory of the machine, in bytes."""

    available: int  # as the system reports it
    free: int  # bytes that another model could use
    promised: int  # bytes that all loaded models may use


class ShareReport(Struct):
    """The bytes of one memory that each of two models would take, and those that they may use together."""

    needed: tuple[int, int]
    available: int


class AdviceReport(Struct):
    """Two models that do not fit together, and what a user can do."""

    models: tuple[str, str]
    memory: dict[str, ShareReport]
    remedy: str


class ModelReports(Struct):
    models: list[ModelReport]
    memory: dict[str, MemoryReport]
    advice: list[AdviceReport]  # about models that were unloaded for each other repeatedly


class LoadRequest(Struct, kw_only=True):
    """A model to load. Null leaves its settings unchanged."""

    model: ModelName | None = None  # null: the default model
    pin: bool | None = None  # whether to keep the model loaded even if another model needs its memory
    ttl: KeepAlive | None = None


class LoadProgress(Struct, kw_only=True):
    """The state of a load. The last line of a load has the `seconds` that it took."""

    model: str
    state: State
    stage: str | UnsetType = UNSET
    done: int | UnsetType = UNSET  # parts of the stage
    total: int | UnsetType | None = UNSET  # null: unknown
    unit: Unit | UnsetType = UNSET  # of `done` and `total`
    seconds: float | UnsetType = UNSET


class UnloadRequest(Struct, kw_only=True):
    """A model to unload, or all models."""

    model: ModelName | None = None
    all: Literal[True] | None = None


class Unloaded(Struct):
    """The names of the models that were loaded."""

    unloaded: list[str]


class OwnModelEndpoints:
    """Endpoints that report, load, and unload models."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._load_decoder = msgspec.json.Decoder(LoadRequest)
        self._unload_decoder = msgspec.json.Decoder(UnloadRequest)

    def endpoints(self) -> list[Endpoint]:
        reported, loaded = "Report the states and the memory of all models", "Load a model, and report the progress"
        unloaded = "Unload models once no request uses them"
        return [
            Endpoint("GET", "/inglenook/models", self.report, reported, gives=ModelReports),
            Endpoint(
                "POST",
                "/inglenook/load",
                self.load,
                loaded,
                takes=LoadRequest,
                gives=LoadProgress,
                streams=LoadProgress,
                framing=LINES,
            ),
            Endpoint("POST", "/inglenook/unload", self.unload, unloaded, takes=UnloadRequest, gives=Unloaded),
        ]

    async def report(self, request: Request) -> Response:
        models, ledger = await self._models.descriptions(), await self._models.residents.memory.measured_ledger()
        reports = [self._report(model) for model in models]
        advice = self._models.residents.advice.given
        return json_reply(ModelReports(reports, _memory_reports(ledger), [*starmap(_advice_report, advice.items())]))

    def _report(self, model: ModelDescription) -> ModelReport:
        resident, task = model.resident, model.resident.task
        return ModelReport(
            name=model.name,
            names=list(model.names),
            kind=model.kind,
            state=resident.state,
            stage=None if task is None else without_folders(task.stage),
            progress=None if task is None else task.fraction,
            pinned=resident.is_pinned,
            expires_in=self._models.seconds_left(model),
            load_seconds=resident.load_seconds or None,
            problem=None if resident.problem is None else client_message(resident.problem),
            context_length=model.context_length,
            tools=model.capabilities.tool_support,
            size=model.details.size,
            stored=model.details.path.exists(),
            memory={memory: MemoryUse.of(held) for memory, held in model.memory.items()},
            parked=0 if resident.parked is None else resident.parked.num_bytes,
        )

    async def load(self, request: Request) -> StreamedReply[LoadProgress]:
        body = await read_body(request, self._load_decoder)
        found = await self._models.names.find(body.model)
        return StreamedReply(self._progress(found.key, found.reply_name, body), error_body, LINES)

    async def _progress(self, key: str, name: str, body: LoadRequest) -> AsyncGenerator[list[LoadProgress]]:
        """Load a model, and yield its state after each change. If the client disconnects, the load loses a waiter."""
        started, resident, last = time.monotonic(), self._models.residents.of(key), None
        loading = asyncio.create_task(self._models.load(body.model, pinned=body.pin, keep_alive=body.ttl))
        try:
            while not (await asyncio.wait((loading,), timeout=POLL_SECONDS))[0]:
                if (state := _load_state(name, resident)) != last:
                    last = state
                    yield [state]
            loading.result()
            yield [LoadProgress(model=name, state=State.LOADED, seconds=round(time.monotonic() - started, 3))]
        finally:
            loading.cancel()

    async def unload(self, request: Request) -> Response:
        body, residents = await read_body(request, self._unload_decoder), self._models.residents
        if body.all:
            keys = [resident.name for resident in residents]
        elif body.model:
            keys = [(await self._models.names.find(body.model)).key]
        else:
            raise InvalidRequest("model: it is required", "Name a model, or send all.", parameter="model")
        were_loaded = await asyncio.gather(*map(residents.unload, keys))
        unloaded = [key for key, was_loaded in zip(keys, were_loaded, strict=True) if was_loaded]
        return json_reply(Unloaded([residents.of(key).title for key in unloaded]))


def _load_state(name: str, resident: Resident[LoadedModel]) -> LoadProgress:
    task = resident.task
    if task is None:
        return LoadProgress(model=name, state=resident.state)
    return LoadProgress(
        model=name,
        state=resident.state,
        stage=without_folders(task.stage),
        done=task.done,
        total=task.total,
        unit=task.unit,
    )


def _advice_report(titles: tuple[str, str], advice: Advice) -> AdviceReport:
    shares = {memory: ShareReport(share.needed, share.available) for memory, share in advice.shares.items()}
    return AdviceReport(titles, shares, advice.remedy)


def _memory_reports(ledger: Ledger) -> dict[str, MemoryReport]:
    promised = {memory: sum(entry.total(memory) for entry in ledger.entries) for memory in ledger.available}
    return {
        memory: MemoryReport(available, ledger.free(memory), promised[memory])
        for memory, available in ledger.available.items()
    }
