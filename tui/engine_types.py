"""The nouns of the engine and of models: what the screens beside the chat are told, as plain data.

Times are seconds, sizes are bytes. Knows no protocol and no widget.
"""

import enum
from dataclasses import dataclass
from typing import NewType

from tui.types import Sanitized

RequestId = NewType("RequestId", str)


# --- the engine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loading(Sanitized):
    """How far the loading of a model is. Filled by the client."""

    model: str
    stage: str  # in words: "reading the weights"
    fraction: float | None = None  # of this stage; None: nobody knows
    loaded: bool = False  # this model answers from now on
    warning: str = ""  # what a person has to know of it


class Phase(enum.Enum):
    """What a request is doing."""

    WAITING = "waiting"
    READING = "reading"  # its prompt is computed
    WRITING = "writing"
    PREEMPTED = "preempted"  # it gave its blocks to others, and goes on later


@dataclass(frozen=True, slots=True)
class EngineRequest(Sanitized):
    """A request of whichever client. Filled by the client from the engine's status."""

    id: RequestId
    client: str  # as it names itself, or ""
    priority: str  # interactive, normal, background
    phase: Phase
    prompt_done: int  # tokens
    prompt_total: int
    reply_tokens: int
    seconds: float  # since it arrived
    mine: bool = False  # asked for by this chat


@dataclass(frozen=True, slots=True)
class Amount(Sanitized):
    """So much of so much. Filled by the client."""

    name: str  # of a tier of the KV cache: "device", "RAM", "disk"; of a memory: "process", "GPU 0"
    used: int
    total: int  # 0: nobody knows


@dataclass(frozen=True, slots=True)
class EngineStatus(Sanitized):
    """The engine at one moment. Filled by the client; asked for once a second while it is looked at."""

    model: str
    requests: tuple[EngineRequest, ...]  # running ones first
    tiers: tuple[Amount, ...]  # of the KV cache
    memory: tuple[Amount, ...]
    prompt_tokens: int  # computed since the start; the chat makes rates of it
    reply_tokens: int  # generated since the start
    is_reported: bool = True  # False: whoever answers tells nothing but its model


# --- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelInfo(Sanitized):
    """A model that is here or could be. Filled by the client; what nobody knows is empty, or None."""

    name: str  # what `pull`, `load` and the command line take
    quantization: str = ""
    size: int | None = None
    license: str = ""
    fits: bool | None = None  # by its size
    is_estimate: bool = False  # of the size, which nobody has counted yet
    installed: bool = False
    loaded: bool = False
    elsewhere: bool = False  # at an endpoint: it can be loaded, and neither fetched nor deleted
    arrived: int | None = None  # bytes of a download that was not finished
    fetching: bool = False  # by the engine, which waits for it: `pull` joins that
    is_repository: bool = False  # of which `variants` can be pulled, and it itself cannot


@dataclass(frozen=True, slots=True)
class SearchResults(Sanitized):
    """What a search found. Filled by the client."""

    models: tuple[ModelInfo, ...]
    note: str = ""  # in words, where they are not what was searched for: the Hub cannot be reached


@dataclass(frozen=True, slots=True)
class Fit(Sanitized):
    """Whether a model fits this machine. Filled by the client."""

    verdict: str  # in words, with how long a context: "fits: 32k context; needs 3.2 GB, 8.0 GB free"
    is_possible: bool


@dataclass(frozen=True, slots=True)
class Recommendation(Sanitized):
    """A model for somebody who is new. Filled by the client."""

    model: str
    verdict: str  # as that of a fit


@dataclass(frozen=True, slots=True)
class Download(Sanitized):
    """How far a download is. Filled by the client."""

    done: int
    total: int | None
    bytes_per_second: float
    stage: str = ""  # in words where bytes are not what is waited for: "verifying"
