"""`ingle run`: one question, one answer. The answer goes to stdout as it is generated, progress to stderr."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from app.commands.options import ENGINE_OPTIONS, engine_options, model_option
from app.commands.run_prompt import previous_run, read_question, save_run
from app.progress import Progress, progress_on_stderr
from app.settings.boxes import find_box
from app.settings.settings import Settings, load_settings
from app.text.terminal_text import sanitize

if TYPE_CHECKING:
    from app.generation.conversation import Message
    from app.generation.events import ChatEvent, ReplyEnd
    from engine.sampling_params import SamplingParams

    # creates the parameters from the values that are recommended for the model
    ParamsOf = Callable[[Mapping[str, float]], SamplingParams]

EXAMPLES = """\b
Examples:
  ingle run "Why is the sky blue?"
  git diff | ingle run "Review this change."
  ingle run --continue "Shorter, please."
  ingle run "Name three rivers." --json --seed 7 | jq -r .text
  ingle run "Hello" --model ./model.gguf --max-tokens 50
  ingle run --once "Why is the sky blue?"
"""

_FAILED = "Run ingle doctor. If it finds nothing, report this as a bug."


@click.command(epilog=EXAMPLES)
@click.argument("prompt", required=False)
@model_option
@click.option(
    "-c",
    "--continue",
    "continues",
    is_flag=True,
    help="Continue the conversation of the previous run, with its model unless --model names another.",
)
@click.option("--no-save", is_flag=True, help="Do not store this exchange for --continue.")
@click.option("-s", "--system", help="System message: instructions that come before the prompt. Default: none.")
@click.option(
    "-n", "--max-tokens", type=int, help="Length limit of the answer in tokens. Default: the rest of the context."
)
@click.option(
    "-t",
    "--temperature",
    type=float,
    help="Randomness of the answer: 0 always takes the most likely token, higher values vary more. "
    "Default for this and the next four options: the value that the model recommends.",
)
@click.option("--top-p", type=float, help="Sample from the smallest set of tokens that reaches this probability.")
@click.option("--top-k", type=int, help="Sample from this many of the most likely tokens.")
@click.option("--min-p", type=float, help="Sample from tokens at least this likely, relative to the most likely one.")
@click.option("--repetition-penalty", type=float, help="Make repeated tokens less likely (values above 1).")
@click.option("--stop", multiple=True, help="End the answer before this text. Repeatable.")
@click.option(
    "--seed", type=int, help="Seed of the random numbers: the same seed gives the same answer. Default: random."
)
@click.option("--once", is_flag=True, help="Load the model in this process only. No server answers or stays.")
@engine_options
@click.option("--json", "as_object", is_flag=True, help="Print one JSON object when the answer is complete.")
@click.option("-q", "--quiet", is_flag=True, help="Print no progress, and no reasoning of the model.")
def run(
    prompt: str | None,
    model: str | None,
    continues: bool,
    no_save: bool,
    system: str | None,
    stop: tuple[str, ...],
    once: bool,
    as_object: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Ask a model one question and print the answer.

    PROMPT is the question; - reads it from stdin. Text that is piped in is appended to PROMPT. The default model is
    downloaded on first use.

    A running server answers, and loads the model if necessary. If none runs, one starts in the background, and ends
    five minutes after its last request (setting keep_alive_s). With --once or an option of the engine, this process
    loads the model and computes the answer.
    """
    settings = load_settings(model=model, **{name: options.pop(name) for name in ENGINE_OPTIONS})
    question = read_question(prompt)
    given = {"stop": stop, **{name: value for name, value in options.items() if value is not None}}
    progress = progress_on_stderr(quiet=quiet)
    from app.generation.conversation import Message
    from app.generation.options import DefaultSampling
    from engine.sampling_params import SamplingParams

    def params(recommended: Mapping[str, float]) -> SamplingParams:
        return SamplingParams(**DefaultSampling(recommended).fill(given))

    SamplingParams(**given)  # raises for invalid values before anything is downloaded
    earlier: list[Message] = []
    if continues:
        used, earlier = previous_run(settings.state_dir)
        settings = settings if model else replace(settings, model=used)
    if system:
        earlier = [Message("system", system), *(message for message in earlier if message.role != "system")]
    messages = [*earlier, Message("user", question)]
    with ExitStack() as resources:
        events = _answer(settings, messages, params, progress, resources, once=once)
        answer = asyncio.run(_show(settings.model, events, progress, as_object=as_object, quiet=quiet))
    if no_save:
        return
    with suppress(OSError):  # the answer is printed; only --continue needs the file
        save_run(settings, messages, answer)


async def _show(
    model: str, events: "AsyncGenerator[ChatEvent]", progress: Progress, *, as_object: bool, quiet: bool
) -> str:
    """Print the answer and return its text."""
    async with aclosing(events), aclosing(_past_the_prompt(events, progress)) as answer:
        if as_object:
            return await _print_object(model, answer)
        return await _print_text(answer, progress, thoughts=not quiet)


def _answer(
    settings: Settings,
    messages: "list[Message]",
    params: "ParamsOf",
    progress: Progress,
    resources: ExitStack,
    *,
    once: bool,
) -> "AsyncGenerator[ChatEvent]":
    """Return the events of the answer, from a server or from an engine in this process.

    Such an engine is loaded before this returns, outside the event loop, so that Ctrl-C stops it at once.
    """
    # A running server may have other engine options than those given here.
    asked = once or any(settings.origins[name].startswith("--") for name in ENGINE_OPTIONS)
    if (box := find_box(settings.model, settings.state_dir)) is not None:
        if asked:
            raise click.UsageError(f"--once and options of the engine do not apply to {box.name}, another machine.")
    elif asked:
        return _by_own_engine(settings, messages, params, progress, resources)
    return _by_server(settings, messages, params, progress)


async def _by_server(
    settings: Settings, messages: "list[Message]", params: "ParamsOf", progress: Progress
) -> "AsyncGenerator[ChatEvent]":
    """Ask a running server, or one that this starts. Does not import torch."""
    gc.disable()  # the imports create no garbage, and collections would take a tenth of their time
    from app.chat_backend.engine.background import background_server
    from app.client.own_server import Client
    from app.settings.api_keys import own_key

    async with AsyncExitStack() as resources:
        resources.callback(gc.enable)
        server = await resources.enter_async_context(background_server(settings, progress))
        client = await resources.enter_async_context(Client(server.instance, own_key(settings)))
        if server.instance.serves_all:
            await client.load_with_progress(server.model, progress)
        recommended = await client.default_sampling(server.model)
        if recommended is None and server.box is None:
            from app.models.sampling_defaults import sampling_from_files

            recommended = sampling_from_files(server.instance)
        async with aclosing(client.stream_chat(server.model, messages, params(recommended or {}))) as events:
            async for event in events:
                yield event


def _by_own_engine(
    settings: Settings,
    messages: "list[Message]",
    params: "ParamsOf",
    progress: Progress,
    resources: ExitStack,
) -> "AsyncGenerator[ChatEvent]":
    """Download and load the model. Imports the engine and torch."""
    from app.generation.template import ChatTemplateRenderer
    from app.models.sources import pull

    stored = pull(settings.model, settings, progress)
    renderer = resources.enter_context(ChatTemplateRenderer())
    renderer.start()
    from app.errors import ReplyFailed
    from app.generation.conversation import Conversation
    from app.generation.options import GenerationOptions
    from app.generation.reply_token_cache import ReplyTokenCache
    from app.generation.service import ChatService
    from app.generation.token_streams import TokenStreams
    from app.models.load.loaded_model import load_model
    from engine.errors import EngineError

    model = load_model(stored, settings, progress)
    chosen = params(model.sampling.values)
    if model.tokenizer.chat_template is None:
        progress.say(f"{stored.name} has no chat template, so it continues the prompt as plain text.")
    reply_tokens = ReplyTokenCache(settings.replies_dir)
    service = ChatService(stored.name, model.tokenizer, TokenStreams(model.engine), renderer, reply_tokens)

    async def events() -> "AsyncGenerator[ChatEvent]":
        async with service.streams:
            replies = service.reply(Conversation(messages), GenerationOptions([chosen]))
            try:
                async with aclosing(replies) as batches:
                    async for batch in batches:
                        for _, event in batch:
                            yield event
            except ReplyFailed as error:
                raise EngineError(error.message, _FAILED) from error

    return events()


async def _past_the_prompt(events: "AsyncGenerator[ChatEvent]", progress: Progress) -> "AsyncGenerator[ChatEvent]":
    """Yield the events after prefill. If prefill takes several events, they are shown as a progress bar."""
    from app.generation.events import PromptProgress

    event = await anext(events)
    if isinstance(event, PromptProgress):
        with progress.task("Reading the prompt", event.total, unit="tokens") as report:
            while isinstance(event, PromptProgress):
                report(event.done)
                event = await anext(events)
    yield event
    async for event in events:
        yield event


async def _print_text(events: "AsyncGenerator[ChatEvent]", progress: Progress, *, thoughts: bool) -> str:
    """Print the answer to stdout, and the reasoning before it to stderr. Return the answer."""
    from app.generation.events import ReasoningDelta, ReplyEnd, TextDelta
    from engine.request import FinishReason

    thinking, text = False, ""
    try:
        async for event in events:
            if isinstance(event, ReasoningDelta) and thoughts:
                thinking = True
                click.echo(sanitize(event.text), nl=False, err=True)
            elif isinstance(event, TextDelta):
                if thinking:
                    click.echo("\n", err=True)
                thinking = False
                text += event.text
                click.echo(sanitize(event.text), nl=False)
            elif isinstance(event, ReplyEnd):
                _check(event)
                if event.finish is FinishReason.LENGTH:
                    progress.say(f"\nThe answer was cut off after {event.completion_tokens} tokens.")
    finally:
        click.echo()
    return text


async def _print_object(model: str, events: "AsyncGenerator[ChatEvent]") -> str:
    """Print one JSON object when the answer is complete. Return the answer."""
    from app.commands.output import as_json
    from app.generation.events import ReasoningDelta, ReplyEnd, TextDelta

    text = reasoning = ""
    async for event in events:
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, ReasoningDelta):
            reasoning += event.text
        elif isinstance(event, ReplyEnd):
            _check(event)
            click.echo(as_json(_summary(model, text, reasoning, event)))
    return text


def _check(end: "ReplyEnd") -> None:
    """Raise EngineError if the answer ended because the engine failed."""
    from engine.errors import EngineError

    if end.error:
        raise EngineError(f"The engine failed: {end.error}", _FAILED)


def _summary(model: str, text: str, reasoning: str, end: "ReplyEnd") -> dict[str, Any]:
    import msgspec

    from app.generation.cache_report import PromptTokensDetails

    decoding = end.total_seconds - end.first_token_seconds
    rate = (end.completion_tokens - 1) / decoding if end.completion_tokens > 1 and decoding > 0 else None
    return {
        "model": model,
        "text": text,
        **({"reasoning": reasoning} if reasoning else {}),
        "finish_reason": end.finish.value,
        "seed": end.seed,
        "usage": {
            "prompt_tokens": end.prompt_tokens,
            "cached_tokens": end.cached_tokens,
            "prompt_tokens_details": msgspec.to_builtins(PromptTokensDetails.of(end.cache)),
            "completion_tokens": end.completion_tokens,
            "total_tokens": end.prompt_tokens + end.completion_tokens,
        },
        "timings": {
            "ttft_ms": round(end.first_token_seconds * 1000, 1),
            "total_ms": round(end.total_seconds * 1000, 1),
            "decode_tok_s": None if rate is None else round(rate, 2),
            "draft_n": end.drafts.drafted,
            "draft_n_accepted": end.drafts.accepted,
        },
    }
