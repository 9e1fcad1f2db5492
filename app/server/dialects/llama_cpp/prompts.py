"""Prompts in all formats of llama.cpp's server: strings, token ids, lists of both, objects, and lists of prompts."""

from collections.abc import Sequence
from typing import Annotated, TypeAlias

from msgspec import Meta, Raw, Struct

from app.server.http.errors import InvalidRequest
from app.server.request_fields import TokenId

MAX_ITEMS = 1 << 20

Mixed: TypeAlias = Annotated[list[str | TokenId], Meta(min_length=1, max_length=MAX_ITEMS)]
OnePrompt: TypeAlias = str | Sequence[str | int]


class PromptObject(Struct):
    """A text, and images or sounds for placeholders in it."""

    prompt_string: str
    multimodal_data: list[Raw] | None = None

    def text(self, field: str) -> str:
        """Return the text. Raises InvalidRequest if there are images or sounds."""
        if self.multimodal_data:
            parameter = f"{field}.multimodal_data"
            raise InvalidRequest(f"{parameter}: this version reads text only", "Send none.", parameter=parameter)
        return self.prompt_string


Prompts: TypeAlias = (
    str | Annotated[list[str | TokenId | PromptObject | Mixed], Meta(min_length=1, max_length=MAX_ITEMS)] | PromptObject
)


def split_prompts(given: Prompts, field: str) -> dict[str, OnePrompt]:
    """Return the prompts of `field`, keyed by their paths. A list that contains a token id is one prompt.

    Raises InvalidRequest for a list or an object among token ids, and for data other than text.
    """
    if isinstance(given, str):
        return {field: given}
    if isinstance(given, PromptObject):
        return {field: given.text(field)}
    if any(isinstance(item, int) for item in given):
        parts = [item for item in given if isinstance(item, str | int)]
        if len(parts) < len(given):
            problem = f"{field}: a list with token ids may contain only strings and token ids"
            raise InvalidRequest(problem, "Send a list of prompts, or one prompt.", parameter=field)
        return {field: parts}
    if len(given) == 1:
        return {field: _prompt(given[0], field)}
    return {(path := f"{field}[{index}]"): _prompt(item, path) for index, item in enumerate(given)}


def _prompt(item: str | int | PromptObject | list[str | int], field: str) -> OnePrompt:
    return item.text(field) if isinstance(item, PromptObject) else [item] if isinstance(item, int) else item
