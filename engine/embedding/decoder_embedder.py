"""A decoder as an embedding model: the vector of a text is the state of its last token, as in Qwen3-Embedding.

The text generation engine computes the states, so texts are batched and common prefixes are computed once. The output
head is replaced by the identity, so a row of logits is a state. A runner that wraps the engine's runner collects these
rows. The interface is that of `engine.embedding.encoder.Embedder`.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import models
from engine.backends.runner import ModelRunner, Ticket
from engine.checkpoints.checkpoint import Checkpoint, StoredWeight
from engine.checkpoints.weights import LoadProgress, Weights
from engine.core import Engine
from engine.counters import EngineState
from engine.errors import EngineError
from engine.load_options import UNCONTROLLED, LoadControl, LoadOptions
from engine.loading import OutputStage, load_engine
from engine.model_config import ModelConfig
from engine.request import Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.step import SampledToken
from engine.thread import EngineThread
from quant.tensor import PlainTensor, QTensor

HEAD = "output.weight"
# the request ends with the step that computes its vector
_ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def _without_head(config: ModelConfig) -> ModelConfig:
    return replace(config, tied_head=False, logit_scale=1.0, logit_softcap=0.0)


class HeadlessWeights(Weights):
    """The weights of a checkpoint, with the identity matrix as the output head."""

    def __init__(
        self,
        path: Path,
        stored: Mapping[str, StoredWeight],
        progress: LoadProgress | None = None,
        threads: int = 1,
        control: LoadControl = UNCONTROLLED,
    ) -> None:
        super().__init__(path, stored, progress, threads, control)
        self.drop(HEAD)

    def __contains__(self, name: str) -> bool:
        return name == HEAD or super().__contains__(name)

    def take(self, name: str, *shape: int) -> QTensor:
        return _identity(shape[-1]) if name == HEAD else super().take(name, *shape)

    def matrix_samples(self) -> list[QTensor]:
        return [*super().matrix_samples(), _identity(32)]


def _identity(width: int) -> PlainTensor:
    return PlainTensor((width, width), "F32", torch.eye(width))


class EmbeddingRunner:
    """A runner that collects the vector of each request whose prompt has been computed.

    The sampled tokens that it returns are meaningless.
    """

    preparations = 0

    failed_captures = 0  # no graphs

    def __init__(self, runner: ModelRunner) -> None:
        self.vectors: dict[int, Tensor] = {}  # request id -> float32 [hidden], normalized
        self._runner = runner
        self.launch, self.recover, self.close = runner.launch, runner.recover, runner.close

    def collect(self, ticket: Ticket) -> list[SampledToken]:
        with self._runner.converting_errors():
            return self._collect(ticket)

    def _collect(self, ticket: Ticket) -> list[SampledToken]:
        asked: list[Request] = []
        reading = [part for part in ticket.parts if part.samples]
        for row, part in enumerate(reading):
            vector = F.normalize(ticket.logits.values[row], dim=0).cpu()
            if not torch.isfinite(vector).all():
                raise EngineError(
                    "The model computed NaN or infinite values", "Its weights may be damaged: pull it again."
                )
            for request in (part.request, *part.followers):
                self.vectors[request.id] = vector
                asked.append(request)
        return [SampledToken(request.id, 0) for request in asked]


class DecoderEmbedder:
    """A loaded decoder with its own engine. Thread-safe."""

    ranks = False

    def __init__(self, engine: Engine[Any], runner: EmbeddingRunner, hidden: int) -> None:
        self.hidden = hidden
        self.vocab_size = engine.vocab_size
        self.context_length = engine.config.context_length - 1  # the engine reserves a position for the next token
        self.threads = engine.config.max_running  # maximum number of texts computed in one batch
        self._engine = engine
        self._vectors = runner.vectors
        self._futures: dict[int, Future[Tensor]] = {}  # request id -> future of its vector
        self._thread = EngineThread(engine, self._on_events)
        self._thread.start()

    def submit(self, ids: Sequence[int], second_start: int | None = None) -> "Future[Tensor]":
        """Submit one text. Returns a future of its vector, float32 [hidden]; cancelling it aborts the request.

        Raises PromptTooLong; IndexError for a token id outside the vocabulary; EngineError if the engine has stopped;
        ValueError for a pair of texts.
        """
        if second_start is not None:
            raise ValueError("a decoder embedder takes one text, not a pair")
        future: Future[Tensor] = Future()

        def register(request: Request) -> None:
            self._futures[request.id] = future
            future.add_done_callback(partial(self._abort_if_cancelled, request.id))

        self._thread.submit(tuple(ids), [_ONE], frozenset(), before=register)
        return future

    def encode(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return the vectors of texts, float32 [texts, hidden]. Raises the errors of `submit`."""
        futures = [self.submit(ids) for ids in sequences]
        return torch.stack([future.result() for future in futures]) if futures else torch.empty(0, self.hidden)

    @property
    def failure(self) -> str:
        return self._thread.failure

    def state(self) -> EngineState:
        """Return the state of the engine. Any thread may call this."""
        return self._engine.state()

    def close(self) -> None:
        """Abort all waiting texts, and free the memory when the current step has ended."""
        self._thread.stop()

    def _abort_if_cancelled(self, request_id: int, future: "Future[Tensor]") -> None:
        if future.cancelled():
            self._thread.abort(request_id)

    def _on_events(self, events: Sequence[TokenEvent]) -> None:
        """Complete the futures of ended requests. Runs on the engine's thread."""
        for event in events:
            if event.finish is None:
                continue
            future, vector = self._futures.pop(event.request_id), self._vectors.pop(event.request_id, None)
            if not future.set_running_or_notify_cancel():
                continue
            if vector is None:
                future.set_exception(
                    EngineError(f"The vector was not computed: {event.error or 'the model is being stopped'}")
                )
            else:
                future.set_result(vector)


def load_decoder_embedder(
    checkpoint: Checkpoint, options: LoadOptions, progress: LoadProgress | None = None
) -> DecoderEmbedder:
    """Load the embedder for an open checkpoint of a decoder family.

    Raises UnsupportedModel, UnsupportedTier, ModelFileError, or OutOfMemory, after releasing everything it allocated.
    """
    made: list[EmbeddingRunner] = []

    def wrapped(runner: ModelRunner) -> EmbeddingRunner:
        made.append(EmbeddingRunner(runner))
        return made[0]

    engine = load_engine(checkpoint, options, progress, OutputStage(_without_head, HeadlessWeights, wrapped))
    with ExitStack() as undo:
        undo.callback(engine.close)
        embedder = DecoderEmbedder(engine, made[0], models.read_config(checkpoint.metadata).hidden)
        undo.pop_all()
    return embedder
