"""Data types about the engine and models that cross the port.

Times are in seconds and sizes in bytes. The client creates all of them.
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
    stage: str  # in words: "reading the weights"
    fraction: float | None = None  # done share of this stage; None: unknown
    loaded: bool = False  # this model answers from now on
    warning: str = ""  # a message for the user about the loaded model


class Phase(enum.Enum):
    """The phase of a request."""

    WAITING = "waiting"
    READING = "reading"  # prefill
    WRITING = "writing"
    PREEMPTED = "preempted"  # its blocks went to other requests; it resumes later


@dataclass(frozen=True, slots=True)
class EngineRequest(Sanitized):
    """A request of any client, from the engine's status report."""

    id: RequestId
    client: str  # the client's user agent, or ""
    priority: str  # interactive, normal, or background
    phase: Phase
    prompt_done: int  # tokens
    prompt_total: int
    reply_tokens: int
    seconds: float  # since it arrived
    mine: bool = False  # whether this chat sent it


@dataclass(frozen=True, slots=True)
class Amount(Sanitized):
    """A used and a total amount of memory, in bytes."""

    name: str  # a tier of the KV cache ("device", "RAM", "disk") or a memory ("process", "GPU 0")
    used: int
    total: int  # 0: unknown


@dataclass(frozen=True, slots=True)
class EngineStatus(Sanitized):
    """A snapshot of the engine. The engine screen requests one every second."""

    model: str
    requests: tuple[EngineRequest, ...]  # running ones first
    tiers: tuple[Amount, ...]  # of the KV cache
    memory: tuple[Amount, ...]
    prompt_tokens: int  # prefilled since the start; the screen computes rates from the difference
    reply_tokens: int  # generated since the start
    is_reported: bool = True  # False: the server reports only its model


# --- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelInfo(Sanitized):
    """A model that is installed or can be downloaded. Unknown values are empty or None."""

    name: str  # the name that `pull`, `load`, and the command line take
    quantization: str = ""
    size: int | None = None
    license: str = ""
    fits: bool | None = None  # estimated from its size
    is_estimate: bool = False  # whether `size` is an estimate
    installed: bool = False
    loaded: bool = False
    elsewhere: bool = False  # on a remote endpoint: can be loaded, but not downloaded or deleted
    arrived: int | None = None  # bytes of an unfinished download
    fetching: bool = False  # the engine is downloading it; `pull` follows that download
    is_recommended: bool = False  # the best model for this machine
    is_repository: bool = False  # a repository; its `variants` can be pulled, but not the repository itself


@dataclass(frozen=True, slots=True)
class SearchResults(Sanitized):
    """The results of a search."""

    models: tuple[ModelInfo, ...]
    note: str = ""  # why these are not results from the Hub, such as being offline


@dataclass(frozen=True, slots=True)
class Fit(Sanitized):
    """Whether a model fits this machine."""

    verdict: str  # in words, with the context length: "fits: 32k context; needs 3.2 GB, 8.0 GB free"
    is_possible: bool


@dataclass(frozen=True, slots=True)
class Recommendation(Sanitized):
    """A model to suggest to a new user."""

    model: str
    verdict: str  # the verdict of its Fit


@dataclass(frozen=True, slots=True)
class Download(Sanitized):
    """Progress of a download."""

    done: int
    total: int | None
    bytes_per_second: float
    stage: str = ""  # in words, if it is not transferring bytes: "verifying"
