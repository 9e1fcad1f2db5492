"""Resident: one model of a server, loaded or not, with the requests that use it and those that wait for it.

`app.models.residency.residents` decides which models are loaded. A `Loader` loads them.
"""

import asyncio
import enum
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from app.errors import AppError
from app.models.residency.advice import Advice
from app.models.residency.ledger import HOST, Bytes, Entry, Use
from app.models.residency.unfreed import Unfreed
from app.progress import Unit
from engine.errors import LoadStopped
from engine.request import ServiceClass
from quant.errors import InglenookError

if TYPE_CHECKING:  # not imported at run time: it imports torch
    from engine.kv.parked_cache import ParkedCache

SWITCHES = 4.0  # length of a turn, in durations of a switch between two models
SHORTEST_TURN, LONGEST_TURN = 2.0, 30.0  # seconds
PATIENCE = 600.0  # seconds that background requests wait before models are unloaded for them that others use
IDLE_GAP = 2.0  # seconds between two requests of a client up to which its model counts as used during its turn


class State(enum.StrEnum):
    UNLOADED = "unloaded"
    WAITING = "waiting"  # for memory, or for the load of another model
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


class Reason(enum.StrEnum):
    """Why a model was unloaded."""

    MEMORY = "memory"  # another model needed it
    IDLE = "idle"
    REQUEST = "request"
    FAILURE = "failure"


class ModelBusy(AppError):
    """A model is not loaded now, and the caller does not want to wait. `seconds` is the expected time until it is."""

    def __init__(self, message: str, remedy: str, seconds: float) -> None:
        super().__init__(message, remedy)
        self.seconds = seconds


class DoesNotFit(AppError):
    """A model needs more memory than all models may use together."""


class Suspended(Protocol):
    """The requests of a model that was unloaded while they ran."""

    @property
    def is_empty(self) -> bool:
        """Whether all of them have ended."""
        ...

    def end(self, problem: str) -> None:
        """End all of them with this error, because their model will not be loaded again."""
        ...


class Loaded(Protocol):
    """A loaded model."""

    @property
    def needs_restart(self) -> bool:
        """Whether only a new process can serve after a failure, as on a GPU."""
        ...

    async def start(self) -> None:
        """Start to serve requests, on this event loop."""
        ...

    def memories(self) -> Mapping[str, Bytes]:
        """Return the bytes that the model may use of each memory."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether it has requests, also those of clients that have disconnected."""
        ...

    @property
    def failure(self) -> str:
        """Why no request can be served any more; empty if one can."""
        ...

    def can_suspend(self, uses: int) -> bool:
        """Whether `uses` requests generate, all of them in the background, and can wait until the model is loaded again
        without losing what they have so far.
        """
        ...

    async def suspend(self) -> "tuple[Suspended, ParkedCache | None]":
        """Return all memory, the requests, and the KV cache. If this fails, the requests end."""
        ...

    def resume(self, suspended: "Suspended") -> None:
        """Continue the requests of an earlier load. Call this after `start`."""
        ...

    async def close(self, *, parks: bool) -> "ParkedCache | None":
        """End all requests, and return all memory. If it `parks`, return the KV cache if it can be parked."""
        ...


LoadedT = TypeVar("LoadedT", bound=Loaded)
LoadedT_co = TypeVar("LoadedT_co", bound=Loaded, covariant=True)


@dataclass(slots=True)
class LoadTask:
    """A load, as seen by the `Loader`: how far it is, and whether to stop."""

    stage: str = ""
    done: int = 0
    total: int | None = None
    unit: Unit = "bytes"
    is_stopped: bool = False
    is_committed: bool = False  # whether other models have been unloaded for it

    @property
    def fraction(self) -> float:
        return self.done / self.total if self.total else 0.0

    def check(self) -> None:
        """Raise LoadStopped if the load is to end."""
        if self.is_stopped:
            raise LoadStopped("The load was stopped")


@dataclass(frozen=True, slots=True)
class Needs:
    """The bytes of each memory that a model needs."""

    useful: Mapping[str, int]  # with a context of useful length
    least: Mapping[str, int] | None = None  # with the shortest context; None: the same


class Loader(Protocol[LoadedT_co]):
    """Plans and loads models. Its methods run on threads."""

    def needs(self, name: str) -> Needs:
        """Return the memory that a model needs.

        Raises ModelNotFound, ModelFileError, or UnsupportedModel.
        """
        ...

    def remedy(self, name: str) -> str:
        """Return what a user can do if a model does not fit even alone."""
        ...

    def together(self, names: tuple[str, str], available: Mapping[str, int]) -> Advice:
        """Return what would let two models fit into these bytes of each memory. Raises the errors of `needs`."""
        ...

    def available(self) -> Mapping[str, int]:
        """Return the bytes of each memory that can be allocated now."""
        ...

    def capacity(self) -> Mapping[str, int]:
        """Return the size of each memory in bytes, including those that other programs use."""
        ...

    def process_memory(self) -> Mapping[str, int]:
        """Return the bytes of each memory that this process holds. A memory that cannot be measured is left out."""
        ...

    def load(self, name: str, allotted: Mapping[str, int], task: LoadTask, parked: "ParkedCache | None") -> LoadedT_co:
        """Load a model that may use at most the allotted bytes of each memory, with the cache of an earlier load."""
        ...


@dataclass(slots=True)
class Waiter:
    """A request that waits until its model is loaded."""

    granted: asyncio.Future[None]
    service: ServiceClass
    arrival: float


@dataclass(frozen=True, slots=True)
class Policy:
    """The name of a model for users, and how long it stays loaded."""

    title: str
    is_pinned: bool = False
    keep_alive: float | None = None


@dataclass(slots=True)
class Resident(Generic[LoadedT]):
    """One model of a server, loaded or not. Times are in seconds, by the clock of `Residents`."""

    name: str  # name by which it is loaded, which may be a path
    title: str  # name for users
    loaded: LoadedT | None = None
    parked: "ParkedCache | None" = None  # KV cache of an earlier load, which the next one uses
    suspended: Suspended | None = None  # background requests that continue when it is loaded again
    suspended_at: float = 0.0
    unfreed: Mapping[str, Unfreed] = field(default_factory=dict)  # memory -> what its unloads did not free
    state: State = State.UNLOADED
    is_pinned: bool = False  # whether the model is never unloaded for another one
    keep_alive: float | None = None  # seconds after its last use until it is unloaded; None: when memory is needed
    loaded_at: float = 0.0
    last_used: float = 0.0
    last_urgent: float = -math.inf  # end of the last request that was not in the background
    lets_others_load: bool = False  # whether its load, which waits for a pause of other models, is after theirs
    keeps_until: float = 0.0  # time until which its background requests are not suspended
    task: LoadTask | None = None
    problem: InglenookError | None = None  # why the model could not be loaded
    retry_at: float = 0.0  # time from which a failed model is tried again
    yields_at: float | None = None  # time from which new requests wait, because another model needs the memory
    load_seconds: float = 0.0  # duration of the last load; 0: not measured
    uses: Counter[ServiceClass] = field(default_factory=Counter)
    waiters: deque[Waiter] = field(default_factory=deque)
    failures: deque[float] = field(default_factory=deque)  # times at which its engine failed
    loads: int = 0  # counters since the start of the server
    failed_loads: int = 0
    unloads: Counter[Reason] = field(default_factory=Counter)

    @property
    def is_used(self) -> bool:
        """Whether it is loaded, and a request uses it."""
        return self.loaded is not None and (self.uses.total() > 0 or self.loaded.is_running)

    @property
    def is_wanted(self) -> bool:
        """Whether requests wait until it is loaded."""
        return bool(self.waiters) or self.suspended is not None

    @property
    def can_be_suspended(self) -> bool:
        """Whether its requests, all of them in the background, can wait until it is loaded again."""
        return self._is_in_background and self.loaded is not None and self.loaded.can_suspend(self.uses.total())

    @property
    def _is_in_background(self) -> bool:
        """Whether it has uses, all of them by background requests."""
        return set(+self.uses) == {ServiceClass.BACKGROUND}

    @property
    def needs_server(self) -> bool:
        """Whether the server must not end because it is idle."""
        is_kept = self.is_pinned and self.loaded is not None
        return self.is_used or is_kept or self.task is not None or self.is_wanted

    @property
    def expires_at(self) -> float | None:
        """Time at which the model is unloaded if no request uses it until then; None: there is none."""
        return None if self.keep_alive is None or self.is_pinned else self.last_used + self.keep_alive

    def admits(self, now: float) -> bool:
        """Whether a new request may use the model without waiting."""
        return self.state is State.LOADED and (self.yields_at is None or now < self.yields_at)

    def entry(self, now: float) -> Entry:
        return Entry(self.name, self.memories(), self._use(now), self.last_used)

    def memories(self) -> Mapping[str, Bytes]:
        """Return the bytes that the model may use of each memory."""
        if self.loaded is not None:
            return self.loaded.memories()
        size = 0 if self.parked is None else self.parked.num_bytes
        return {HOST: Bytes(cache=size, touched=size)} if size else {}

    def _use(self, now: float) -> Use:
        if self.loaded is None and self.task is None:
            return Use.PARKED
        if self.is_pinned or self.state is not State.LOADED:
            return Use.KEPT
        if self.is_used:
            return Use.BACKGROUND if self._is_in_background else Use.BUSY
        has_turn = self.admits(now) and now - self.loaded_at < self.turn(self.load_seconds)
        return Use.BUSY if has_turn and now - self.last_used < IDLE_GAP else Use.IDLE

    @staticmethod
    def turn(switch_seconds: float) -> float:
        """Return the seconds for which a model admits requests while another one waits for its memory.

        At four times the duration of a switch, at most a fifth of the time is lost to switches.
        """
        return min(max(SWITCHES * switch_seconds, SHORTEST_TURN), LONGEST_TURN)

    def urgency(self) -> tuple[int, float]:
        """Return the class and the arrival of the most urgent request that waits, or else of the suspension."""
        waiting = [(waiter.service, waiter.arrival) for waiter in self.waiters]
        return min(waiting, default=(ServiceClass.BACKGROUND, self.suspended_at))

    def is_patient(self, now: float) -> bool:
        """Whether only background requests wait for the model, and not for long."""
        service, arrival = self.urgency()
        return service is ServiceClass.BACKGROUND and now - arrival < PATIENCE

    def grant(self) -> None:
        """Admit all requests that wait."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.granted.done():
                self.uses[waiter.service] += 1
                waiter.granted.set_result(None)

    def refuse(self, problem: InglenookError) -> None:
        """Raise an error in all requests that wait."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.granted.done():
                waiter.granted.set_exception(problem)

    def end_suspended(self, problem: str) -> None:
        """End the suspended requests, because the model will not be loaded again."""
        suspended, self.suspended = self.suspended, None
        if suspended is not None:
            suspended.end(problem)
