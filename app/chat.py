"""The chat service: from messages to a stream of events, over one loaded model.

Renders and encodes the conversation, gives the ids to the engine, and turns token events back into text: whole
characters, cut before a stop string. Knows nothing of terminals and wire formats; every front end folds the same events.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.chat_template import ChatTemplateRenderer
from app.detokenizer import IncrementalDetokenizer
from app.loaded_model import LoadedModel
from app.messages import Message
from engine.request import FinishReason, Request, SamplingParams, TokenEvent


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of the prompt has been read, in tokens. Sent while a long prompt is read."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the reply; never half a character, never a part of a stop string."""

    text: str


@dataclass(frozen=True, slots=True)
class ReplyEnd:
    """The last event of a reply."""

    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    first_token_seconds: float  # from the question to the first token
    total_seconds: float


ChatEvent = PromptProgress | TextDelta | ReplyEnd


class ChatService:
    """Answers conversations with one model, one at a time."""

    def __init__(self, model: LoadedModel, renderer: ChatTemplateRenderer) -> None:
        self._model = model
        self._renderer = renderer

    @property
    def has_template(self) -> bool:
        """Whether the model knows turns. One that does not continues the text of the conversation."""
        return self._model.tokenizer.chat_template is not None

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt for the assistant's next turn. Raises TemplateError."""
        raise RuntimeError

    def reply(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[ChatEvent]:
        """Answer. Closing the iterator stops the reply at once, in any phase.

        Raises TemplateError, PromptTooLong or InvalidSampling before the first event.
        """
        started = time.monotonic()
        engine, tokenizer = self._model.engine, self._model.tokenizer
        request = engine.submit(self.encode(messages), params, tokenizer.end_of_generation_ids)
        text = IncrementalDetokenizer(tokenizer, params.stop)
        first_token_at = 0.0
        try:
            while True:
                events = [event for event in engine.step() if event.request_id == request.id]
                if not request.output_ids:
                    yield PromptProgress(request.num_computed, len(request.prompt_ids))
                for event in events:
                    first_token_at = first_token_at or time.monotonic()
                    yield from self._text(event, text)
        finally:
            engine.abort(request.id)
