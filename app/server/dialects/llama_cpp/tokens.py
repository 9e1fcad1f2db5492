"""Texts and conversations as token ids, and ids as texts: in the shapes of llama.cpp's server, and in vLLM's."""

import asyncio
from collections.abc import Sequence
from functools import partial

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from app.chat.service import ChatService
from app.server.dialects.llama_cpp.errors import ERRORS
from app.server.dialects.llama_cpp.fields import DETOKENIZE, TEMPLATE, TOKENIZE
from app.server.dialects.llama_cpp.token_requests import (
    DetokenizeRequest,
    Messages,
    TemplateRequest,
    TokenizeRequest,
)
from app.server.endpoint import Endpoint
from app.server.errors import InvalidRequest, naming
from app.server.reply import json_reply
from app.server.request_body import read_body
from app.server.served_model import ServedModel


class Piece(Struct):
    id: int
    piece: str | list[int]  # the bytes, where they are no text


class Tokens(Struct):
    """The last three fields are vLLM's."""

    tokens: list[int | Piece]
    count: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    token_strs: list[str] | UnsetType | None = UNSET  # as the vocabulary writes them


class Text(Struct):
    """Under llama.cpp's name, or under vLLM's."""

    content: str | UnsetType = UNSET
    prompt: str | UnsetType = UNSET


class Prompt(Struct):
    prompt: str


class TokenEndpoints:
    """Of one model."""

    def __init__(self, service: ChatService, model: ServedModel) -> None:
        self._service = service
        self._model = model

    def endpoints(self) -> list[Endpoint]:
        endpoint = partial(Endpoint, "POST", errors=ERRORS)
        texts, ids, prompt = (
            "The text of token ids",
            "The token ids of a text or of a conversation",
            "The prompt that a conversation becomes",
        )
        encoded, decoded = partial(endpoint, takes=TokenizeRequest), partial(endpoint, takes=DetokenizeRequest)
        return [
            encoded("/tokenize", self.tokenize, ids, gives=Tokens, fields=TOKENIZE),
            decoded("/detokenize", self.detokenize, texts, gives=Text, fields=DETOKENIZE),
            endpoint("/apply-template", self.apply, prompt, takes=TemplateRequest, gives=Prompt, fields=TEMPLATE),
        ]

    async def tokenize(self, request: Request) -> Response:
        wanted = await read_body(request, TOKENIZE)
        self._model.check(wanted.model)
        wanted.check()
        if wanted.messages is not None:
            return json_reply(self._counted(wanted, await self._conversation_ids(wanted, wanted.messages)))
        if wanted.prompt is not None:
            with_start = wanted.add_special_tokens is not False
            ids = await asyncio.to_thread(self._ids, wanted.prompt, parse_special=True, with_start=with_start)
            return json_reply(self._counted(wanted, ids))
        return json_reply(await asyncio.to_thread(self._tokens, wanted, wanted.content or ""))

    def _tokens(self, wanted: TokenizeRequest, content: str) -> Tokens:
        ids = self._ids(content, parse_special=wanted.parse_special, with_start=wanted.add_special)
        if not wanted.with_pieces:
            return Tokens([*ids])
        tokenizer = self._service.tokenizer
        return Tokens([Piece(one, _piece(tokenizer.token_bytes(one, show_control=True))) for one in ids])

    def _ids(self, text: str, *, parse_special: bool, with_start: bool) -> list[int]:
        tokenizer = self._service.tokenizer
        ids = tokenizer.encode(text, parse_special=parse_special)
        starts = with_start and tokenizer.add_bos and tokenizer.bos_id is not None
        return [tokenizer.bos_id, *ids] if starts and tokenizer.bos_id is not None else ids

    async def _conversation_ids(self, wanted: TokenizeRequest, messages: Messages) -> Sequence[int]:
        conversation = wanted.conversation_of(messages)
        with naming("messages"):
            return (await self._service.prompt(conversation)).ids

    def _counted(self, wanted: TokenizeRequest, ids: Sequence[int]) -> Tokens:
        texts = [self._service.tokenizer.written(one) for one in ids] if wanted.return_token_strs else None
        return Tokens([*ids], len(ids), self._service.context_length, texts)

    async def detokenize(self, request: Request) -> Response:
        wanted = await read_body(request, DETOKENIZE)
        self._model.check(wanted.model)
        text = await asyncio.to_thread(shown, self._service, wanted.tokens)
        return json_reply(Text(prompt=text) if wanted.model else Text(content=text))

    async def apply(self, request: Request) -> Response:
        wanted = await read_body(request, TEMPLATE)
        self._model.check(wanted.model)
        with naming("messages"):
            prompt = await self._service.prompt(wanted.conversation())
        return json_reply(Prompt(await asyncio.to_thread(shown, self._service, prompt.ids)))


async def mixed_ids(service: ChatService, prompt: Sequence[str | int]) -> tuple[int, ...]:
    """The ids of texts and ids, one after the other."""

    def encoded() -> tuple[int, ...]:
        ids: list[int] = []
        for part in prompt:
            ids += [part] if isinstance(part, int) else service.tokenizer.encode(part, parse_special=True)
        return tuple(ids)

    return await asyncio.to_thread(encoded)


def shown(service: ChatService, ids: Sequence[int]) -> str:
    """The text of ids, control tokens included. Raises InvalidRequest."""
    if ids and (largest := max(ids)) >= service.vocab_size:
        problem = f"token id {largest} is not in the vocabulary of {service.vocab_size}"
        raise InvalidRequest(f"tokens: {problem}", parameter="tokens")
    pieces = (service.tokenizer.token_bytes(one, show_control=True) for one in ids)
    return b"".join(pieces).decode(errors="replace")


def _piece(encoded: bytes) -> str | list[int]:
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        return list(encoded)
