"""Encoding and decoding of texts and conversations, in the formats of llama.cpp's server and of vLLM."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from app.generation.service import ChatService
from app.process.work_pool import Check
from app.server.dialects.llama_cpp.errors import ERRORS
from app.server.dialects.llama_cpp.fields import DETOKENIZE, TEMPLATE, TOKENIZE
from app.server.dialects.llama_cpp.token_requests import DetokenizeRequest, TemplateRequest, TokenizeRequest
from app.server.http.endpoint import Endpoint
from app.server.http.errors import check_vocabulary, convert_errors
from app.server.http.reply import json_reply, json_reply_on_thread
from app.server.http.request_body import read_body
from app.server.served_models import ServedModels


class Piece(Struct):
    id: int
    piece: str | list[int]  # a list of bytes if they are not valid UTF-8


class Tokens(Struct):
    """Token ids. The last three fields are vLLM's."""

    tokens: list[int | Piece]
    count: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    token_strs: list[str] | UnsetType | None = UNSET  # entries of the vocabulary for these tokens


class Text(Struct):
    """A text, in llama.cpp's field or in vLLM's."""

    content: str | UnsetType = UNSET
    prompt: str | UnsetType = UNSET


class Prompt(Struct):
    prompt: str


class TokenEndpoints:
    """Endpoints that convert between texts and token ids."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def endpoints(self) -> list[Endpoint]:
        endpoint = partial(Endpoint, "POST", errors=ERRORS)
        texts, ids, prompt = (
            "Decode token ids",
            "Encode text or a conversation",
            "Render the prompt of a conversation",
        )
        return [
            endpoint("/tokenize", self.tokenize, ids, takes=TokenizeRequest, gives=Tokens),
            endpoint("/detokenize", self.detokenize, texts, takes=DetokenizeRequest, gives=Text),
            endpoint("/apply-template", self.apply_template, prompt, takes=TemplateRequest, gives=Prompt),
        ]

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request, TOKENIZE)
        body.check()
        service = (await self._models.chat(request, body.model)).service
        if body.messages is not None:
            with convert_errors("messages"):
                ids: Sequence[int] = (await service.prompt(body.conversation_of(body.messages))).ids
            return await _reply(service, lambda check: _vllm_tokens(service, body, ids, check))
        if body.prompt is not None:
            add_bos = body.add_special_tokens is not False
            ids = await _encode_field(service, "prompt", body.prompt, parse_special=True, add_bos=add_bos)
            return await _reply(service, lambda check: _vllm_tokens(service, body, ids, check))
        text, add_bos = body.content or "", body.add_special
        ids = await _encode_field(service, "content", text, parse_special=body.parse_special, add_bos=add_bos)
        return await _reply(service, lambda check: _llama_cpp_tokens(service, body, ids, check))

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request, DETOKENIZE)
        text = await decode_ids((await self._models.chat(request, body.model)).service, body.tokens)
        return json_reply(Text(prompt=text) if body.model else Text(content=text))

    async def apply_template(self, request: Request) -> Response:
        body = await read_body(request, TEMPLATE)
        service = (await self._models.chat(request, body.model)).service
        with convert_errors("messages"):
            prompt = await service.prompt(body.conversation())
        return json_reply(Prompt(await decode_ids(service, prompt.ids)))


async def _reply(service: ChatService, write: Callable[[Check], Tokens]) -> Response:
    return await json_reply_on_thread(service.texts, lambda check: msgspec.json.encode(write(check)))


def _llama_cpp_tokens(service: ChatService, body: TokenizeRequest, ids: Sequence[int], check: Check) -> Tokens:
    if not body.with_pieces:
        return Tokens([*ids])
    return Tokens([*map(Piece, ids, map(_piece, service.tokenizer.shown_bytes(ids, check)))])


def _vllm_tokens(service: ChatService, body: TokenizeRequest, ids: Sequence[int], check: Check) -> Tokens:
    check()
    texts = [service.tokenizer.raw_text(one) for one in ids] if body.return_token_strs else None
    return Tokens([*ids], len(ids), service.context_length, texts)


async def _encode_field(
    service: ChatService, field: str, text: str, *, parse_special: bool, add_bos: bool
) -> list[int]:
    """Encode the text of a field. Raises InvalidRequest.

    With `add_bos`, a BOS token is added if the model uses one.
    """
    with convert_errors(field):
        ids = await service.tokenize(text, parse_special=parse_special)
    tokenizer = service.tokenizer
    return [tokenizer.bos_id, *ids] if add_bos and tokenizer.add_bos and tokenizer.bos_id is not None else ids


async def decode_ids(service: ChatService, ids: Sequence[int]) -> str:
    """Return the text of token ids, control tokens included. Raises InvalidRequest."""
    check_vocabulary(ids, service.vocab_size, "tokens")
    return await service.detokenize(ids)


def _piece(encoded: bytes) -> str | list[int]:
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        return list(encoded)
