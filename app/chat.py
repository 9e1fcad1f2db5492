"""The chat service: from messages to a stream of events, over one loaded model.

Renders and encodes the conversation, gives the ids to the engine, and turns token events back into text: whole
characters, cut before a stop string. Knows nothing of terminals and wire formats; all front ends fold the same events.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from app.chat_template import ChatTemplateRenderer
from app.messages import Json, Message
from app.models.loaded_model import LoadedModel
from app.text.detokenizer import IncrementalDetokenizer
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
    seed: int
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
        """The prompt for the assistant's next turn; what people wrote stays text. Raises TemplateError."""
        tokenizer = self._model.tokenizer
        protected = [message.with_texts(tokenizer.protect) for message in messages]
        ids = tokenizer.encode_rendered(self._render(protected))
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids.insert(0, tokenizer.bos_id)
        return tuple(ids)

    def _render(self, messages: Sequence[Message]) -> str:
        tokenizer = self._model.tokenizer
        if tokenizer.chat_template is None:
            return "\n\n".join(message.content for message in messages)
        variables: dict[str, Json] = dict(tokenizer.special_tokens)
        return self._renderer.render(tokenizer.chat_template, messages, variables=variables)

    def reply(self, messages: Sequence[Message], params: SamplingParams) -> Generator[ChatEvent]:
        """Answer. Closing the iterator stops the reply at once, in any phase.

        Raises TemplateError, PromptTooLong or InvalidSampling before the first event.
        """
        started = time.monotonic()
        engine, tokenizer = self._model.engine, self._model.tokenizer
        request = engine.request(self.encode(messages), params, tokenizer.end_of_generation_ids)
        engine.add(request)
        text = IncrementalDetokenizer(tokenizer, params.stop)
        first_token_at = 0.0
        try:
            while True:
                for event in engine.step():
                    first_token_at = first_token_at or time.monotonic()
                    delta, finish = self._text(event, text)
                    if delta:
                        yield TextDelta(delta)
                    if finish:
                        yield _end(request, finish, started, first_token_at)
                        return
                if not first_token_at:
                    yield PromptProgress(request.num_computed, len(request.prompt_ids))
        finally:
            engine.abort(request.id)

    def _text(self, event: TokenEvent, text: IncrementalDetokenizer) -> tuple[str, FinishReason | None]:
        """What a token adds to the reply, and why the reply ends, if it does."""
        delta = "" if event.token_id is None else text.push(event.token_id)
        if text.stopped is not None:
            return delta, FinishReason.STOP
        return (delta + text.finish(), event.finish) if event.finish else (delta, None)


def _end(request: Request, finish: FinishReason, started: float, first_token_at: float) -> ReplyEnd:
    return ReplyEnd(
        finish=finish,
        seed=request.params.seed,
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=len(request.output_ids),
        first_token_seconds=first_token_at - started,
        total_seconds=time.monotonic() - started,
    )
