"""What llama.cpp's server tells of itself and of its model: its properties, and texts as ids and back."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from app.chat.service import ChatService
from app.chat.template import MAX_TEXT_CHARS
from app.server.dialects.llama_cpp.errors import ERRORS
from app.server.dialects.llama_cpp.replies import GenerationSettings
from app.server.dialects.llama_cpp.requests import CompletionRequest
from app.server.dialects.openai.chat_requests import ChatCompletionRequest
from app.server.endpoint import Endpoint
from app.server.errors import InvalidRequest, naming
from app.server.field_types import TokenId
from app.server.reply import json_reply
from app.server.request_body import read_body
from app.server.served_model import ServedModel
from app.text.tokenizer import Tokenizer
from app.work_pool import Check

_AT_ONCE = 1 << 13  # ids that are translated between two looks whether the client is still there

ANY_SEED = 0xFFFFFFFF  # as llama.cpp tells that each request gets its own


class Modalities(Struct):
    vision: bool = False
    audio: bool = False


class DefaultSettings(Struct):
    n_ctx: int
    params: GenerationSettings  # of a request that gives none


class Properties(Struct, kw_only=True):
    default_generation_settings: DefaultSettings
    total_slots: int  # requests that run at the same time at most
    model_alias: str
    model_path: str  # its name: where it lies is nobody's business
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: Modalities
    build_info: str
    is_sleeping: bool = False


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize. A text of more than 1,048,576 tokens is refused."""

    content: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
    add_special: bool = False  # what the model wants in front of a prompt
    parse_special: bool = True
    with_pieces: bool = False


class Piece(Struct):
    id: int
    piece: str | list[int]  # the bytes, where they are no text


class Tokens(Struct):
    tokens: list[int | Piece]


class DetokenizeRequest(Struct):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=1 << 20)]


class Content(Struct):
    content: str


class TemplateRequest(ChatCompletionRequest, kw_only=True):
    """POST /apply-template."""

    model: Annotated[str, Meta(max_length=1024)] = ""


class Prompt(Struct):
    prompt: str


class TokenEndpoints:
    """Of one model."""

    def __init__(self, service: ChatService, model: ServedModel) -> None:
        self._service = service
        self._model = model
        self._tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
        self._template_decoder = msgspec.json.Decoder(TemplateRequest)

    def endpoints(self) -> list[Endpoint]:
        endpoint = partial(Endpoint, errors=ERRORS)
        texts, ids, prompt = (
            "The text of token ids",
            "The token ids of a text",
            "The prompt that a conversation becomes",
        )
        return [
            endpoint("GET", "/props", self.properties, "What the server is and has", gives=Properties),
            endpoint("POST", "/tokenize", self.tokenize, ids, takes=TokenizeRequest, gives=Tokens),
            endpoint("POST", "/detokenize", self.detokenize, texts, takes=DetokenizeRequest, gives=Content),
            endpoint("POST", "/apply-template", self.apply, prompt, takes=TemplateRequest, gives=Prompt),
        ]

    async def properties(self, request: Request) -> Response:
        service, special = self._service, self._service.tokenizer.special_tokens
        told = Properties(
            default_generation_settings=DefaultSettings(service.context_length, self._default_settings()),
            total_slots=service.streams.max_running,
            model_alias=service.name,
            model_path=service.name,
            chat_template=service.tokenizer.chat_template or "",
            bos_token=special.get("bos_token", ""),
            eos_token=special.get("eos_token", ""),
            modalities=Modalities(),
            build_info="inglenook",
        )
        return json_reply(told)

    def _default_settings(self) -> GenerationSettings:
        params = CompletionRequest(prompt="", seed=ANY_SEED).choices(sampling=self._service.sampling).candidates[0]
        return GenerationSettings.of(params, self._service.context_length)

    async def tokenize(self, request: Request) -> Response:
        wanted = await read_body(request, self._tokenize_decoder)
        with naming("content"):
            ids = await self._service.tokenized(wanted.content, parse_special=wanted.parse_special)
        tokenizer = self._service.tokenizer
        if wanted.add_special and tokenizer.add_bos and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id, *ids]

        def told(check: Check) -> bytes:
            pieces = _pieces(tokenizer, ids, check) if wanted.with_pieces else iter(ids)
            return msgspec.json.encode(Tokens([*pieces]))

        return Response(await self._service.texts.run(told), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        wanted = await read_body(request, self._detokenize_decoder)
        return json_reply(Content(await self._shown(wanted.tokens)))

    async def apply(self, request: Request) -> Response:
        wanted = await read_body(request, self._template_decoder)
        wanted.check()
        with naming("messages"):
            prompt = await self._service.prompt(wanted.conversation())
        return json_reply(Prompt(await self._shown(prompt.ids)))

    async def _shown(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included. Raises InvalidRequest."""
        tokenizer = self._service.tokenizer
        if ids and (largest := max(ids)) >= self._service.vocab_size:
            problem = f"token id {largest} is not in the vocabulary of {self._service.vocab_size}"
            raise InvalidRequest(f"tokens: {problem}", parameter="tokens")

        def decoded(check: Check) -> str:
            return b"".join(_token_bytes(tokenizer, ids, check)).decode(errors="replace")

        return await self._service.texts.run(decoded)


def _token_bytes(tokenizer: Tokenizer, ids: Sequence[int], check: Check) -> Iterator[bytes]:
    for start in range(0, len(ids), _AT_ONCE):
        check()
        yield from (tokenizer.token_bytes(one, show_control=True) for one in ids[start : start + _AT_ONCE])


def _pieces(tokenizer: Tokenizer, ids: Sequence[int], check: Check) -> Iterator[Piece]:
    return map(Piece, ids, map(_piece, _token_bytes(tokenizer, ids, check)))


def _piece(encoded: bytes) -> str | list[int]:
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        return list(encoded)
