"""The next turn of a conversation: what every dialect makes of a chat request, and how the reply to it comes.

One place for what all of them need: the prompt is made, the grammar of the reply is compiled, and its events are
generated. Knows no wire format.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from app.errors import InvalidGrammar
from app.generation.cache_report import CacheReport
from app.generation.conversation import Conversation
from app.generation.model_replies import ChatPrompt
from app.generation.service import ChatService
from app.server.choices import Batch, WantedChoices, generate_choices
from app.server.errors import naming
from app.server.structured_output import AskedGrammar, naming_grammar
from app.server.usage import TokenCounts
from engine.grammar import Grammar
from engine.request import Origin


@dataclass(frozen=True, slots=True)
class Turn:
    """What is asked of a chat."""

    conversation: Conversation
    choices: WantedChoices  # without their grammar
    grammar: AskedGrammar | None = None  # that the reply keeps to
    field: str = "messages"  # of the request, that the conversation came in
    left_out: tuple[str, ...] = ()  # of its prompt: see CacheReport
    prompt: ChatPrompt | None = None  # of the conversation, if it is known already


async def turn_events(service: ChatService, turn: Turn, origin: Origin, counts: TokenCounts) -> AsyncGenerator[Batch]:
    """The replies to a turn, as batches of (choice, event); see `generate_choices`. Nothing comes before the engine has
    begun with it, so that what is refused or fails at once can be raised: InvalidRequest, InvalidSampling,
    EngineError, ReplyFailed, ReplyAborted."""
    with naming(turn.field):
        with service.preparation.of_request():
            prompt = turn.prompt or await service.prompt(turn.conversation)
            grammar, parameter = await _grammar(service, prompt, turn)
            choices = turn.choices.keeping_to(grammar, parameter)
        counts.cache = counts.cache.plus(CacheReport(left_out=turn.left_out))
        replies = generate_choices(
            service,
            [prompt.ids],
            choices,
            origin,
            counts,
            continues_text=bool(turn.conversation.begun),
            new_parser=prompt.new_parser,
        )
        async with aclosing(replies) as batches:
            async for batch in batches:
                yield batch


async def _grammar(service: ChatService, prompt: ChatPrompt, turn: Turn) -> tuple[Grammar | None, str]:
    """What the reply follows, and the field that asks for it: calls that are forced, or the grammar that was asked for,
    within the limit of thoughts. Raises InvalidRequest."""
    asked = turn.grammar
    wanted = None if asked is None else asked.source
    source, of_calls = prompt.grammar(wanted)
    parameter = "tools" if of_calls or asked is None else asked.parameter
    if source is None:
        return prompt.within_budget(None), parameter
    try:
        grammar = await service.grammars.compile(source)
    except InvalidGrammar:
        if asked is not None and source is not asked.source:  # one of the parts that it is made of is at fault
            await asked.compiled(service.grammars)
            parameter = "tools" if turn.conversation.callable_tools else parameter
        if (loose := prompt.loose_grammar(wanted)) is None:
            with naming_grammar(parameter):
                raise
        grammar = await AskedGrammar(loose, parameter).compiled(service.grammars)
    return prompt.within_budget(grammar), parameter
