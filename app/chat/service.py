"""The chat service: from messages to a stream of events, over one loaded model.

Renders and encodes the conversation, gives the ids to the engine, and turns token events back into text: whole
characters, cut before a stop string. Knows nothing of terminals and wire formats; all front ends fold the same events.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from app.chat.events import ChatEvent, PromptLogprobs, PromptProgress, ReplyEnd, TextDelta
from app.chat.messages import Json, Message
from app.chat.template import ChatTemplateRenderer
from app.chat.token_streams import TokenStreams
from app.text.detokenizer import IncrementalDetokenizer
from app.text.tokenizer import Tokenizer
from engine.request import PROGRAM, FinishReason, Origin, Request, SamplingParams, TokenEvent, TokenLogprobs


class ChatService:
    """Answers conversations with one model, any number at a time."""

    def __init__(self, name: str, tokenizer: Tokenizer, streams: TokenStreams, renderer: ChatTemplateRenderer) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.streams = streams
        self._renderer = renderer

    @property
    def context_length(self) -> int:
        return self.streams.context_length

    @property
    def vocab_size(self) -> int:
        """Ids below this are in the vocabulary, of the model and of its tokenizer."""
        return min(self.streams.vocab_size, self.tokenizer.vocab_size)

    async def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt for the assistant's next turn; what people wrote stays text. Raises TemplateError."""
        return await asyncio.to_thread(self._encode, messages)

    def _encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        protected = [message.with_texts(self.tokenizer.protect) for message in messages]
        return self._begun(self.tokenizer.encode_rendered(self._render(protected)))

    def _begun(self, ids: list[int]) -> tuple[int, ...]:
        """`ids` behind the token that begins a text, where the model wants one and the ids have none."""
        bos_id = self.tokenizer.bos_id
        missing = self.tokenizer.add_bos and bos_id is not None and ids[:1] != [bos_id]
        return (bos_id, *ids) if missing and bos_id is not None else tuple(ids)

    def _render(self, messages: Sequence[Message]) -> str:
        """A model without a template does not know turns: it continues the text of the conversation."""
        if self.tokenizer.chat_template is None:
            return "\n\n".join(message.content for message in messages)
        variables: dict[str, Json] = dict(self.tokenizer.special_tokens)
        return self._renderer.render(self.tokenizer.chat_template, messages, variables=variables)

    async def encode_text(self, text: str) -> tuple[int, ...]:
        """A prompt that is no conversation: its text as it stands, control tokens in it included."""
        return await asyncio.to_thread(lambda: self._begun(self.tokenizer.encode(text, parse_special=True)))

    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        origin: Origin = PROGRAM,
        continues_text: bool = False,
    ) -> AsyncGenerator[ChatEvent]:
        """Continue a prompt; `continues_text` where the reply goes on in the middle of a text, not as a turn.

        Closing the generator ends the request at once, in any phase. The last event is a ReplyEnd. Raises
        PromptTooLong, InvalidSampling or EngineError before the first event.
        """
        asked = [(prompt_ids, params)]
        batches = self.generate_several(asked, origin=origin, continues_text=continues_text)
        async with aclosing(batches):
            async for batch in batches:
                for _, event in batch:
                    yield event

    async def generate_several(
        self,
        asked: Sequence[tuple[tuple[int, ...], SamplingParams]],
        *,
        origin: Origin = PROGRAM,
        continues_text: bool = False,
    ) -> AsyncGenerator[list[tuple[int, ChatEvent]]]:
        """Continue several prompts at once. Yields what has come meanwhile, never nothing: each event with the index
        of its reply. Of each reply this is what `generate` yields.

        A prompt that several of them continue, one after the other, is read once. One that asks for a beam search has
        as many replies as that has results, best first; they come when it has ended.
        """
        end_ids = self.tokenizer.end_of_generation_ids
        replies: dict[int, _Reply] = {}
        with self.streams.open() as stream:
            for prompt_ids, several in _families(asked):
                for request in stream.submit_several(prompt_ids, several, end_ids, origin):
                    reply = _Reply(len(replies), request, self.tokenizer, continues_text=continues_text)
                    replies[request.id] = reply
            async for tokens in stream:
                batch: list[tuple[int, ChatEvent]] = []
                for token in tokens:
                    reply = replies[token.request_id]
                    batch += [(reply.index, event) for event in reply.events(token)]
                    if reply.ended:
                        stream.abort(token.request_id, FinishReason.STOP)  # at a stop string, where it still runs
                if batch:
                    yield batch


def _families(
    asked: Sequence[tuple[tuple[int, ...], SamplingParams]],
) -> list[tuple[tuple[int, ...], list[SamplingParams]]]:
    """Each run of equal prompts as one. A prompt is read again for each that reports on it, or searches."""
    families: list[tuple[tuple[int, ...], list[SamplingParams]]] = []
    for prompt_ids, params in asked:
        alone = params.prompt_logprobs is not None or params.beams is not None
        if families and families[-1][0] == prompt_ids and not alone:
            families[-1][1].append(params)
        else:
            families.append((prompt_ids, [params]))
    return families


class _Reply:
    """Folds the token events of one request into chat events."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, *, continues_text: bool) -> None:
        self.index = index
        self.ended = False
        self._request = request
        self._stop_token_ids = request.params.stop_token_ids
        self._text = IncrementalDetokenizer(tokenizer, request.params.stop, continues_text=continues_text)
        self._logprobs: list[TokenLogprobs] = []
        self._started = time.monotonic()
        self._first_token_at = 0.0
        self._tokens = 0

    def events(self, token: TokenEvent) -> list[ChatEvent]:
        """What a token event means to the reader of the reply. Nothing, once a stop string has ended it."""
        if self.ended:
            return []
        events: list[ChatEvent] = [PromptLogprobs(token.prompt_logprobs)] if token.prompt_logprobs else []
        if token.token_id is None and token.finish is None:
            total = len(self._request.prompt_ids)
            # A request that gave way reads its prompt again in the middle of its reply, which is nobody's news.
            return events if self._tokens else [*events, PromptProgress(min(token.num_computed, total), total)]
        text = "" if token.token_id is None else self._take(token.token_id, token.logprobs)
        finish = FinishReason.STOP if self._text.stopped is not None else token.finish
        if finish is not None and self._text.stopped is None:
            text += self._text.finish()
        if text or (finish and self._logprobs):
            events.append(TextDelta(text, tuple(self._logprobs)))
            self._logprobs.clear()
        if finish is not None:
            self.ended = True
            events.append(self._end(finish, token.error))
        return events

    def _take(self, token_id: int, logprobs: TokenLogprobs | None) -> str:
        self._tokens += 1
        self._first_token_at = self._first_token_at or time.monotonic()
        if logprobs is not None:
            self._logprobs.append(logprobs)
        return "" if token_id in self._stop_token_ids else self._text.push(token_id)

    def _end(self, finish: FinishReason, error: str) -> ReplyEnd:
        request, now = self._request, time.monotonic()
        return ReplyEnd(
            finish=finish,
            stop=self._text.stopped,
            seed=request.params.seed,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=request.num_cached,
            completion_tokens=self._tokens,
            first_token_seconds=(self._first_token_at or now) - self._started,
            total_seconds=now - self._started,
            error=error,
        )
