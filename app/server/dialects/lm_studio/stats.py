"""Statistics that LM Studio's older API adds to OpenAI's replies: speeds, the model, and the runtime."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict
from starlette.requests import Request

from app.models.details import ModelDetails
from app.server.dialects.openai.chat import ChatCompletion
from app.server.dialects.openai.completions import Completion
from app.server.dialects.openai.reports import VERSION
from app.server.http.reply import StreamedReply, WholeReply
from app.server.served_models import ServedModels
from app.server.usage import Timings
from app.settings.settings import APP_NAME

StopReason: TypeAlias = Literal["maxPredictedTokensReached", "toolCalls"]
Handler: TypeAlias = Callable[[Request], Awaitable[StreamedReply[Any] | WholeReply[Any]]]

# Keyed by OpenAI's reason. "stop" is missing, because it can mean an end token or a stop string.
_STOP_REASONS: Mapping[str | None, StopReason] = {"length": "maxPredictedTokensReached", "tool_calls": "toolCalls"}


class Stats(Struct, kw_only=True):
    tokens_per_second: float
    time_to_first_token: float  # seconds, like the next field
    generation_time: float
    stop_reason: StopReason | UnsetType = UNSET


class ModelInfo(Struct):
    arch: str
    quant: str
    format: str
    context_length: int


class Runtime(Struct):
    name: str = APP_NAME
    version: str = VERSION
    supported_formats: tuple[str, ...] = ("gguf", "safetensors")


class ChatWithStats(ChatCompletion, kw_only=True):
    stats: Stats | UnsetType = UNSET
    model_info: ModelInfo
    runtime: Runtime


class CompletionWithStats(Completion, kw_only=True):
    stats: Stats | UnsetType = UNSET
    model_info: ModelInfo
    runtime: Runtime


def with_stats(handler: Handler, models: ServedModels, kind: type[ChatWithStats | CompletionWithStats]) -> Handler:
    """Wrap `handler` so that a whole reply is of type `kind`, with statistics. Streams are not changed."""

    async def reply(request: Request) -> StreamedReply[Any] | WholeReply[Any]:
        plain = await handler(request)
        if isinstance(plain, StreamedReply):
            return plain

        async def fold(chunks: AsyncGenerator[Any]) -> Struct:
            whole = await plain.fold(chunks)
            model = await models.describe(whole.model)
            info = _info(model.details, model.context_length)
            return kind(**asdict(whole), stats=_stats(whole), model_info=info, runtime=Runtime())

        return replace(plain, fold=fold)

    return reply


def _stats(whole: ChatCompletion | Completion) -> Stats | UnsetType:
    timings = whole.timings
    if not isinstance(timings, Timings):
        return UNSET
    reason = _STOP_REASONS.get(whole.choices[0].finish_reason, UNSET)
    return Stats(
        tokens_per_second=timings.predicted_per_second,
        time_to_first_token=((timings.queue_ms or 0) + (timings.restore_ms or 0) + timings.prompt_ms) / 1000,
        generation_time=timings.predicted_ms / 1000,
        stop_reason=reason,
    )


def _info(details: ModelDetails, context_length: int) -> ModelInfo:
    return ModelInfo(
        details.architecture or "unknown", details.quantization or "unknown", details.format, context_length
    )
