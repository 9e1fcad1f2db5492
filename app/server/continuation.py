"""What a text goes on with: what every dialect makes of a request for a completion, and how the reply to it comes.

The counterpart of `app.server.turn` for prompts that are no conversation. A prompt is taken as it is: control tokens in
it are control tokens, for clients that write a chat's markup themselves. Knows no wire format.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from app.generation.service import ChatService
from app.server.choices import Batch, WantedChoices, generate_choices
from app.server.errors import InvalidRequest, check_vocabulary, naming
from app.server.structured_output import AskedGrammar
from app.server.usage import TokenCounts
from app.text.infilling import Gap
from engine.errors import PromptTooLong
from engine.request import Origin


@dataclass(frozen=True, slots=True)
class Continuation:
    """What is asked of some texts."""

    prompts: Sequence[tuple[int, ...]]
    choices: WantedChoices  # without their grammar
    grammar: AskedGrammar | None = None  # that each reply keeps to


async def continuation_events(
    service: ChatService, wanted: Continuation, origin: Origin, counts: TokenCounts
) -> AsyncGenerator[Batch]:
    """What the prompts go on with, as batches of (choice, event); see `generate_choices`. Nothing comes before the
    engine has begun with it, so that what is refused or fails at once can be raised: InvalidRequest, InvalidSampling,
    EngineError, ReplyFailed, ReplyAborted."""
    with service.preparation.of_request():
        grammar = None if wanted.grammar is None else await wanted.grammar.compiled(service.grammars)
    parameter = "" if wanted.grammar is None else wanted.grammar.parameter
    choices = wanted.choices.keeping_to(grammar, parameter)
    with naming("prompt"):
        replies = generate_choices(service, wanted.prompts, choices, origin, counts, continues_text=True)
        async with aclosing(replies) as batches:
            async for batch in batches:
                yield batch


async def text_prompt(service: ChatService, prompt: str | tuple[int, ...], field: str = "prompt") -> tuple[int, ...]:
    """The ids of a prompt that came in `field`. Raises InvalidRequest for one that is empty, too long, or not of the
    vocabulary."""
    with naming(field):
        ids = await service.encode_text(prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise InvalidRequest(f"{field}: it is empty", "Send at least one token.", parameter=field)
    check_vocabulary(ids, service.vocab_size, field)
    return ids


async def infill_prompt(service: ChatService, gap: Gap, field: str = "suffix") -> tuple[int, ...]:
    """The ids of a prompt for what is missing. Raises InvalidRequest naming `field` for a model that cannot be asked,
    and where the texts are too long."""
    with naming(field):
        ids = await service.encode_infill(gap)
    if ids is None:
        problem = f"{service.name} has no tokens to be asked for what is missing in the middle"
        raise InvalidRequest(f"{field}: {problem}", "Leave it out, or take a model for code.", parameter=field)
    return ids


async def fitting_infill(service: ChatService, gap: Gap, room: int, field: str) -> tuple[tuple[int, ...], int]:
    """The ids of such a prompt with as many of its other files, the last ones, as leave `room` for so many tokens
    behind it; and how many were left out. Raises what `infill_prompt` raises."""
    kept = gap
    while kept.others:
        with suppress(PromptTooLong):
            ids = await service.encode_infill(kept)
            if ids is None or len(ids) + room <= service.context_length:
                break
        kept = replace(kept, others=kept.others[1 + len(kept.others) // 4 :])
    return await infill_prompt(service, kept, field), len(gap.others) - len(kept.others)
