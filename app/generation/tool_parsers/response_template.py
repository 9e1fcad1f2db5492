"""Reads the format of a model's replies from the `response_template` in its tokenizer_config.json.

A template that the format cannot express is refused as a whole. Templates are untrusted and never run. Source:
transformers, docs/source/en/chat_response_parsing.md, version 1.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from app.generation.conversation import Json
from app.generation.tool_parsers.anchor_pattern import UnsupportedPattern, literal_markup, markup_of
from app.generation.tool_parsers.json_bodies import ARGUMENT_KEYS, NAME_KEYS
from app.generation.tool_parsers.reply_format import (
    NO_MESSAGES,
    CallSyntax,
    MessageSyntax,
    ReplyFormat,
    ThinkingSyntax,
)

_THINKING = ("thinking", "reasoning", "reasoning_content")
_FIELDS = frozenset((*_THINKING, "content", "tool_calls"))
_PLACEHOLDER = re.compile(r"\{(?:content\.)?(\w+)\}")
_OPEN_TAG = re.compile(r"<(\w+)[\s=>]")
_CONTENT, _NAME = "{content}", "{name}"

Anchors = str | Annotated[list[str], Meta(min_length=1, max_length=8)]


class _Field(Struct, forbid_unknown_fields=True):
    open: Anchors | None = None
    open_pattern: str | None = None
    close: Anchors | None = None
    close_pattern: str | None = None
    content: str = "text"
    content_args: dict[str, Any] = {}
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: Any = None
    transform_each: bool = False

    @property
    def opens(self) -> Sequence[str]:
        return _markups(self.open, self.open_pattern)

    @property
    def closes(self) -> Sequence[str]:
        return _markups(self.close, self.close_pattern)


class _Template(Struct, forbid_unknown_fields=True):
    fields: dict[str, _Field]
    start_anchor: Anchors | None = None
    start_anchor_pattern: str | None = None
    defaults: dict[str, Any] = {}
    version: int = 1


def parse_response_template(response_template: Mapping[str, object]) -> ReplyFormat:
    """Convert a response template to a format. Raises UnsupportedPattern."""
    try:
        template = msgspec.convert(response_template, _Template)
    except msgspec.ValidationError as error:
        raise UnsupportedPattern(str(error)) from error
    unknown = template.fields.keys() - _FIELDS
    if template.version != 1 or unknown:
        raise UnsupportedPattern(f"version {template.version}, fields {sorted(unknown)}")
    reasoning = next((template.fields[name] for name in _THINKING if name in template.fields), None)
    calls = template.fields.get("tool_calls")
    return ReplyFormat(
        None if reasoning is None else _thinking(reasoning),
        None if calls is None else _calls(calls),
        _messages(template),
    )


def _markups(literals: Anchors | None, pattern: str | None) -> Sequence[str]:
    if pattern is not None:
        return markup_of(pattern)
    return [literal_markup(one) for one in ([literals] if isinstance(literals, str) else literals or ())]


def _thinking(field: _Field) -> ThinkingSyntax:
    begin, end = ([one for one in marks if "{" not in one] for marks in (field.opens, field.closes))
    if not begin or not end:
        raise UnsupportedPattern("reasoning without a start or an end")
    return ThinkingSyntax(begin, end)


def _messages(template: _Template) -> MessageSyntax:
    """Return the markup around the answer. If there is none, the answer is all remaining text."""
    anchors = _markups(template.start_anchor, template.start_anchor_pattern)
    content = template.fields.get("content", _Field())
    others = [one for field in template.fields.values() for one in field.opens if one not in content.opens]
    openings = [one for one in anchors if any(other.startswith(one) for other in others)]
    silent = dict.fromkeys((*content.opens, *content.closes, *anchors))
    if not silent:
        return NO_MESSAGES
    return MessageSyntax("", tuple(silent), openings, next(iter(content.opens), ""))


def _calls(field: _Field) -> CallSyntax:
    closes = field.closes
    if field.content == "json":
        body, written = _json_body(field.transform, each=field.transform_each)
    elif field.content == "xml-inline" and _function_of(field.transform) == {"name": _NAME, "arguments": _CONTENT}:
        body, written = "{parameters}", ""
    else:
        raise UnsupportedPattern(f"calls whose content is {field.content}")
    heads = [one for one in field.opens if (_NAME in one) == (body in ("{json}", "{parameters}"))]
    if not heads:
        raise UnsupportedPattern("calls without a start, or without a name")
    tagged = body == "{parameters}"
    calls = [head + body + _tail(head, closes, tags=tagged) for head in heads]
    parameters = _parameters(field) if tagged else ()
    return CallSyntax("response-template", calls, parameters, object=written, listed=field.transform_each)


def _tail(head: str, closes: Sequence[str], *, tags: bool) -> str:
    """Return the markup that ends a call. It closes those tags of `head` that the template leaves open."""
    close = closes[0] if closes else ""
    open_tags = [f"</{tag}>" for tag in reversed(_OPEN_TAG.findall(head))] if tags else []
    return "\n".join([*(tag for tag in open_tags if tag not in close), close])


def _function_of(transform: Json) -> Json:
    return transform.get("function") if isinstance(transform, Mapping) else None


def _json_body(transform: Json, *, each: bool) -> tuple[str, str]:
    """Return the body placeholder of a call's markup ("{json}" or "{objects}"), and the template of one JSON object."""
    function = _function_of(transform)
    if transform is None or (function == _CONTENT and not each):
        return "{objects}", _object_of("name", "arguments")
    if not isinstance(function, Mapping) or function.keys() != {"name", "arguments"}:
        raise UnsupportedPattern("the transform of calls")
    if function == {"name": _NAME, "arguments": _CONTENT} and not each:
        return "{json}", ""
    found = [_PLACEHOLDER.fullmatch(str(function[key])) for key in ("name", "arguments")]
    name, arguments = (one[1] if one else "" for one in found)
    if name not in NAME_KEYS or arguments not in ARGUMENT_KEYS:
        raise UnsupportedPattern("the transform of calls")
    return "{objects}", _object_of(name, arguments)


def _object_of(name: str, arguments: str) -> str:
    return f'{{"{name}": "{{name}}", "{arguments}": {{arguments}}}}'


def _parameters(field: _Field) -> Sequence[str]:
    pattern = field.content_args.get("tag_pattern")
    found = markup_of(pattern) if isinstance(pattern, str) else []
    written = [f"{one}\n" for one in found if "{key}" in one and "{value}" in one.partition("{key}")[2]]
    if not written:
        raise UnsupportedPattern("the pattern of parameters")
    return written
