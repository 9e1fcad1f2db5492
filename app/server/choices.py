"""The choices of one request: several replies at once, and what they used together.

Nothing here knows a wire format.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from app.chat.events import ChatEvent, ReplyEnd
from app.chat.service import ChatService
from app.server.errors import ReplyAborted, ReplyFailed
from engine.request import FinishReason, Origin, SamplingParams


@dataclass(slots=True)
class TokenCounts:
    """Tokens of all choices of a request. A prompt that several choices continue counts once."""

    prompt: int = 0
    cached: int = 0  # of the prompts', as the first choice of each found them
    completion: int = 0

    def add(self, end: ReplyEnd, *, first_of_prompt: bool) -> None:
        """Count a choice that has ended."""
        self.completion += end.completion_tokens
        if first_of_prompt:
            self.prompt += end.prompt_tokens
            self.cached += end.cached_tokens


async def generate_choices(
    service: ChatService,
    prompts: Sequence[tuple[int, ...]],
    params: Sequence[SamplingParams],
    origin: Origin,
    *,
    continues_text: bool = False,
) -> AsyncGenerator[list[tuple[int, ChatEvent]]]:
    """Continue each prompt once with each of `params`; yields batches of (choice, event), choices in order of prompts.

    Raises what `ChatService.generate` raises; ReplyFailed or ReplyAborted where the engine gave one up, after what came
    before. Closing the generator ends all of them.
    """
    asked = [(prompt, one) for prompt in prompts for one in params]
    batches = service.generate_several(asked, origin=origin, continues_text=continues_text)
    async with aclosing(batches):
        async for batch in batches:
            good, failure = _up_to_failure(batch)
            if good:
                yield good
            if failure is not None:
                raise failure


def _up_to_failure(
    batch: list[tuple[int, ChatEvent]],
) -> tuple[list[tuple[int, ChatEvent]], ReplyFailed | ReplyAborted | None]:
    """What came before the engine gave a reply up, and that as an error; all of it, where it did not."""
    for position, (_, event) in enumerate(batch):
        if isinstance(event, ReplyEnd) and event.finish is FinishReason.ERROR:
            return batch[:position], ReplyFailed(f"The engine failed: {event.error}", "Try again.")
        if isinstance(event, ReplyEnd) and event.finish is FinishReason.ABORT:
            return batch[:position], ReplyAborted("The engine is being stopped", "Try again when it runs.")
    return batch, None
