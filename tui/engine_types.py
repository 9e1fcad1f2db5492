"""Data types of the client protocols about the engine and models.

Times are in seconds and sizes in bytes. The client creates all objects.
"""

import enum
from dataclasses import dataclass
from typing import NewType

from tui.types import Sanitized

RequestId = NewType("RequestId", str)


# --- the engine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loading(Sanitized):
    """Progress of loading a model."""

    model: str
    stage: str  # description of the stage: "reading the weights"
    fraction: float | None = None  # fraction of this stage that is done; None: unknown
    loaded: bool = False  # whether the model is loaded and answers from now on
    warning: str = ""  # a message for the user about the loaded model
    amount: str = ""  # the part of this stage that is done: "30.1 of 98.4 MB, 12 MB/s, 6 s left"

    @property
    def stage_and_amount(self) -> str:
        return ", ".join(filter(None, (self.stage, self.amount)))


class Phase(enum.Enum):
    """The phase of a request."""

    WAITING = "waiting"
    READING = "reading"  # prefill
    WRITING = "writing"
    PREEMPTED = "preempted"  # its KV blocks were given to other requests; it resumes later


@dataclass(frozen=True, slots=True)
class EngineRequest(Sanitized):
    """A request of any client, from the engine's status report."""

    id: RequestId
    client: str  # the client's user agent, or ""
    priority: str  # interactive, normal, or background
    phase: Phase
    prompt_done: int  # number of prefilled prompt tokens
    prompt_total: int
    reply_tokens: int
    seconds: float  # seconds since the request arrived
    mine: bool = False  # whether this chat sent it


@dataclass(frozen=True, slots=True)
class Amount(Sanitized):
    """A used and a total amount of memory, in bytes."""

    name: str  # a tier of the KV cache ("device", "RAM", "disk") or a kind of memory ("process", "GPU 0")
    used: int
    total: int  # 0: unknown


@dataclass(frozen=True, slots=True)
class ModelMemory(Sanitized):
    """A model of the server that is loaded or loading, and its memory in bytes."""

    name: str
    state: str  # "loaded", or its progress: "loading 43 %"
    weights: int = 0
    cache_used: int = 0
    cache_total: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus(Sanitized):
    """A snapshot of the engine. The engine screen requests one every second."""

    model: str
    requests: tuple[EngineRequest, ...]  # running requests first
    tiers: tuple[Amount, ...]  # usage of each KV cache tier
    memory: tuple[Amount, ...]
    prompt_tokens: int  # tokens that all loaded models have prefilled; the screen computes rates from differences
    reply_tokens: int  # tokens that all loaded models have generated
    models: tuple[ModelMemory, ...] = ()  # all models of the server that are loaded or loading
    free: int = 0  # bytes of memory that another model could use; 0: unknown
    is_reported: bool = True  # False: the server reports only its model


# --- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelInfo(Sanitized):
    """A model that is installed or can be downloaded. Unknown values are empty or None."""

    name: str  # the name that `pull`, `load`, and the command line take
    quantization: str = ""
    size: int | None = None
    license: str = ""
    fits: bool | None = None  # whether it fits the memory, estimated from its size
    is_estimate: bool = False  # whether `size` is an estimate
    installed: bool = False
    loaded: bool = False
    elsewhere: bool = False  # whether it is on a remote endpoint: it can be loaded, but not downloaded or deleted
    is_own: bool = False  # whether it is a file that the user named by its path: the user deletes it
    arrived: int | None = None  # downloaded bytes of an unfinished download
    fetching: bool = False  # whether the engine is downloading it; `pull` follows that download
    speed: float | None = None  # expected tokens per second of a reply; None: unknown
    is_recommended: bool = False  # whether it is the best model for this machine
    is_repository: bool = False  # whether it is a repository: only its `variants` can be pulled


@dataclass(frozen=True, slots=True)
class SearchResults(Sanitized):
    """The results of a search."""

    models: tuple[ModelInfo, ...]
    note: str = ""  # reason why these results are not from the Hub, such as a missing connection


@dataclass(frozen=True, slots=True)
class Fit(Sanitized):
    """Whether a model fits this machine."""

    verdict: str  # description with the context length: "fits: 32k context; needs 3.2 GB, 8.0 GB free"
    is_possible: bool


@dataclass(frozen=True, slots=True)
class Recommendation(Sanitized):
    """A model that is suggested to a new user."""

    model: str
    verdict: str  # the `verdict` of the model's Fit


@dataclass(frozen=True, slots=True)
class Download(Sanitized):
    """Progress of a download."""

    done: int
    total: int | None
    bytes_per_second: float
    stage: str = ""  # description of the stage if no bytes are transferred: "verifying"
