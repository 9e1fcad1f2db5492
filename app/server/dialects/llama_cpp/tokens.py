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
from app.server.served_model import ServedModel


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
    """Endpoints of one model."""

    def __init__(self, service: ChatService, model: ServedModel) -> None:
        self._service = service
        self._model = model

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
        self._model.check(body.model)
        body.check()
        if body.messages is not None:
            with convert_errors("messages"):
                ids: Sequence[int] = (await self._service.prompt(body.conversation_of(body.messages))).ids
            return await self._write_reply(lambda check: self._vllm_tokens(body, ids, check))
        if body.prompt is not None:
            add_bos = body.add_special_tokens is not False
            ids = await self._encode_field("prompt", body.prompt, parse_special=True, add_bos=add_bos)
            return await self._write_reply(lambda check: self._vllm_tokens(body, ids, check))
        content = body.content or ""
        ids = await self._encode_field("content", content, parse_special=body.parse_special, add_bos=body.add_special)
        return await self._write_reply(lambda check: self._llama_cpp_tokens(body, ids, check))

    async def _write_reply(self, write: Callable[[Check], Tokens]) -> Response:
        return await json_reply_on_thread(self._service.texts, lambda check: msgspec.json.encode(write(check)))

    def _llama_cpp_tokens(self, body: TokenizeRequest, ids: Sequence[int], check: Check) -> Tokens:
        if not body.with_pieces:
            return Tokens([*ids])
        return Tokens([*map(Piece, ids, map(_piece, self._service.tokenizer.shown_bytes(ids, check)))])

    def _vllm_tokens(self, body: TokenizeRequest, ids: Sequence[int], check: Check) -> Tokens:
        check()
        texts = [self._service.tokenizer.raw_text(one) for one in ids] if body.return_token_strs else None
        return Tokens([*ids], len(ids), self._service.context_length, texts)

    async def _encode_field(self, field: str, text: str, *, parse_special: bool, add_bos: bool) -> list[int]:
        """Encode the text of a field. Raises InvalidRequest.

        With `add_bos`, a BOS token is added if the model uses one.
        """
        with convert_errors(field):
            ids = await self._service.tokenize(text, parse_special=parse_special)
        tokenizer = self._service.tokenizer
        return [tokenizer.bos_id, *ids] if add_bos and tokenizer.add_bos and tokenizer.bos_id is not None else ids

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request, DETOKENIZE)
        self._model.check(body.model)
        text = await decode_ids(self._service, body.tokens)
        return json_reply(Text(prompt=text) if body.model else Text(content=text))

    async def apply_template(self, request: Request) -> Response:
        body = await read_body(request, TEMPLATE)
        self._model.check(body.model)
        with convert_errors("messages"):
            prompt = await self._service.prompt(body.conversation())
        return json_reply(Prompt(await decode_ids(self._service, prompt.ids)))


async def decode_ids(service: ChatService, ids: Sequence[int]) -> str:
    """Return the text of token ids, control tokens included. Raises InvalidRequest."""
    check_vocabulary(ids, service.vocab_size, "tokens")
    return await service.detokenize(ids)


def _piece(encoded: bytes) -> str | list[int]:
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        return list(encoded)
