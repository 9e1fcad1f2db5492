"""`ingle run`: one question, one answer. The answer goes to stdout as it is generated, all narration to stderr."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING, Any

import click

from app.commands.options import GPU_OPTIONS, gpu_options
from app.progress import Progress, progress_on_stderr
from app.settings.settings import Settings, load_settings
from app.text.terminal_text import sanitize

if TYPE_CHECKING:
    from app.generation.conversation import Message
    from app.generation.events import ChatEvent, ReplyEnd
    from app.process.instance import Instance
    from engine.sampling_params import SamplingParams

    ParamsOf = Callable[[Mapping[str, float]], SamplingParams]  # from what is recommended for the model that answers

EXAMPLES = """\b
Examples:
  ingle run "Why is the sky blue?"
  git diff | ingle run - --system "Review this change."
  ingle run "Name three rivers." --json --seed 7 | jq -r .text
  ingle run "Hello" --model ./model.gguf --max-tokens 50
"""

_FAILED = "Run ingle doctor; if it finds nothing, report this."
ENGINE_OPTIONS = ("context", "threads", "kernels", "quantize", "kv_disk_gb", *GPU_OPTIONS)


@click.command(epilog=EXAMPLES)
@click.argument("prompt", required=False)
@click.option("-m", "--model", help="A model of the catalog or of the Hub, or the path of a GGUF file or a folder.")
@click.option("-s", "--system", help="What the model is told before the prompt.")
@click.option("-n", "--max-tokens", type=int, help="End the answer after this many tokens.")
@click.option("-t", "--temperature", type=float, help="0 takes the most likely token always; higher is more varied.")
@click.option("--top-p", type=float, help="Keep the fewest tokens that reach this probability together.")
@click.option("--top-k", type=int, help="Keep this many of the most likely tokens.")
@click.option("--min-p", type=float, help="Keep tokens at least this likely, relative to the most likely one.")
@click.option("--repetition-penalty", type=float, help="Above 1 makes tokens less likely that appeared before.")
@click.option("--stop", multiple=True, help="End the answer before this text; may be given several times.")
@click.option("--seed", type=int, help="The same seed gives the same answer.")
@click.option("--context", type=int, help="Longest prompt and answer together, in tokens.")
@click.option("--threads", type=int, help="Threads of the CPU engine.")
@gpu_options
@click.option("--kernels", help="Kernels of the engine: auto, cuda, cpu or reference.")
@click.option("--quantize", metavar="METHOD", help="What 16- or 32-bit layers become: fp8, int4 or nf4.")
@click.option("--kv-disk-gb", metavar="GB", help="What was computed and is kept on disk, at most; 0: nothing. Or auto.")
@click.option("--json", "as_object", is_flag=True, help="Print one JSON object when the answer is complete.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no narration.")
def run(
    prompt: str | None,
    model: str | None,
    system: str | None,
    stop: tuple[str, ...],
    context: int | None,
    threads: int | None,
    kernels: str | None,
    device: str | None,
    gpu_memory: str | None,
    deterministic: bool | None,
    quantize: str | None,
    kv_disk_gb: str | None,
    as_object: bool,
    quiet: bool,
    **sampling: float | None,
) -> None:
    """Ask a model one question.

    PROMPT is the question; - reads it from stdin. The default model is fetched when it is used for the first time.
    """
    settings = load_settings(
        model=model,
        context=context,
        threads=threads,
        kernels=kernels,
        device=device,
        gpu_memory=gpu_memory,
        deterministic=deterministic,
        quantize=quantize,
        kv_disk_gb=kv_disk_gb,
    )
    question = _question(prompt)
    given: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    progress = progress_on_stderr(quiet=quiet)
    from app.generation.conversation import Message
    from app.generation.options import DefaultSampling
    from engine.sampling_params import SamplingParams

    def params(recommended: Mapping[str, float]) -> SamplingParams:
        return SamplingParams(**DefaultSampling(recommended).fill({"stop": stop, **given}))

    SamplingParams(**given)  # what makes no sense is told before anything is fetched
    messages = [*([Message("system", system)] if system else []), Message("user", question)]
    with ExitStack() as resources:
        events = _answer(settings, messages, params, progress, resources)
        asyncio.run(_show(settings.model, events, progress, as_object=as_object, quiet=quiet))


async def _show(
    model: str, events: "AsyncGenerator[ChatEvent]", progress: Progress, *, as_object: bool, quiet: bool
) -> None:
    async with aclosing(events), aclosing(_past_the_prompt(events, progress)) as answer:
        if as_object:
            await _print_object(model, answer)
        else:
            await _print_text(answer, progress, thoughts=not quiet)


def _question(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("Give a prompt, or - to read it from stdin.")
    if prompt is None or prompt == "-":
        prompt = sys.stdin.buffer.read().decode("utf-8", errors="replace").rstrip("\n")
    if not prompt.strip():
        raise click.UsageError("The prompt is empty.")
    return prompt


def _answer(
    settings: Settings,
    messages: "list[Message]",
    params: "ParamsOf",
    progress: Progress,
    resources: ExitStack,
) -> "AsyncGenerator[ChatEvent]":
    """The events of the answer: from a running server of the model, else from an engine in this process.

    Fetching and loading are done when this returns: outside the event loop, where Ctrl-C ends them at once.
    """
    from app.client.running_server import find_instance
    from app.settings.api_keys import own_key

    # Who asks for an engine of a certain kind gets one of his own.
    asked = any(settings.origins[name].startswith("--") for name in ENGINE_OPTIONS)
    if not asked and (server := find_instance(settings)):
        return _by_server(server, own_key(settings), messages, params)
    return _by_own_engine(settings, messages, params, progress, resources)


async def _by_server(
    server: "Instance", key: str | None, messages: "list[Message]", params: "ParamsOf"
) -> "AsyncGenerator[ChatEvent]":
    """Ask a server that has the model loaded. Imports no torch."""
    from app.client.own_server import Client

    async with Client(server, key) as client:
        recommended = await client.default_sampling()
        if not recommended:
            from app.models.sampling_defaults import files_sampling

            recommended = files_sampling(server)
        async with aclosing(client.stream_chat(messages, params(recommended))) as events:
            async for event in events:
                yield event


def _by_own_engine(
    settings: Settings,
    messages: "list[Message]",
    params: "ParamsOf",
    progress: Progress,
    resources: ExitStack,
) -> "AsyncGenerator[ChatEvent]":
    """Fetch and load the model. Imports the engine, and torch with it."""
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
        progress.say(f"{stored.name} has no chat template: it continues the prompt as plain text.")
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
    """The events without those about reading the prompt, which become a progress bar when there are several."""
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


async def _print_text(events: "AsyncGenerator[ChatEvent]", progress: Progress, *, thoughts: bool) -> None:
    """The answer on stdout; what the model thinks before it is narration."""
    from app.generation.events import ReasoningDelta, ReplyEnd, TextDelta
    from engine.request import FinishReason

    thinking = False
    try:
        async for event in events:
            if isinstance(event, ReasoningDelta) and thoughts:
                thinking = True
                click.echo(sanitize(event.text), nl=False, err=True)
            elif isinstance(event, TextDelta):
                if thinking:
                    click.echo("\n", err=True)
                thinking = False
                click.echo(sanitize(event.text), nl=False)
            elif isinstance(event, ReplyEnd):
                _check(event)
                if event.finish is FinishReason.LENGTH:
                    progress.say(f"\nThe answer was cut off after {event.completion_tokens} tokens.")
    finally:
        click.echo()


async def _print_object(model: str, events: "AsyncGenerator[ChatEvent]") -> None:
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


def _check(end: "ReplyEnd") -> None:
    """Raise for an answer that ended because something broke."""
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
        },
    }
