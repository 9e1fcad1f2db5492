"""The reply parser: any split gives the same events, nothing raises, and invalid markup is text."""

import json
import random
from collections.abc import Mapping

import pytest

from app.generation.conversation import Json
from app.generation.events import ReasoningDelta, TextDelta, ToolCallEnd, ToolCallStart
from app.generation.generic_tools import generic_format
from app.generation.tool_parsers.formats import CALLS, MESSAGES, THINKING
from app.generation.tool_parsers.reply_format import PLAIN, CallSyntax, MessageSyntax, ReplyFormat, ThinkingSyntax
from app.generation.tool_parsers.reply_parser import FormatMarkup, ReplyParser
from tests.app.generation.tool_parsers.parsed_reply import Call, cut, parse_pieces, parsed

TOOLS: Mapping[str, Json] = {
    "f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}}
}
BY_NAME = {syntax.name: syntax for syntax in CALLS}
THINK = ThinkingSyntax(("<think>",), ("</think>",))
ALL_MESSAGES = MessageSyntax("", tuple(text for one in MESSAGES for text in one.silent))
HERMES = ReplyFormat(THINK, BY_NAME["hermes"])
CODER = ReplyFormat(THINK, BY_NAME["qwen-coder"])
GENERIC = generic_format(ReplyFormat(THINK))
HARMONY = ReplyFormat(THINKING[0], BY_NAME["harmony"], MESSAGES[0])


def format_with(syntax: CallSyntax) -> ReplyFormat:
    return ReplyFormat(THINKING[0] if syntax.name == "harmony" else THINK, syntax, ALL_MESSAGES)


def called(written: str, syntax: CallSyntax) -> str:
    """Return a call as the format writes it."""
    parameter = (
        syntax.parameters[0].replace("{key}", "a").replace("{value}", "x").replace("{type}", "true")
        if syntax.parameters
        else ""
    )
    filled = {
        "json": '{"a": "x"}',
        "objects": '[{"name": "f", "arguments": {"a": "x"}}]',
        "keyed": '[{"f": {"a": "x"}}]',
        "parameters": parameter,
        "python": "[f(a='x')]",
        "name": "f",
        "id": "1",
        "any": "",
    }
    for hole, text in filled.items():
        written = written.replace(f"{{{hole}}}", text)
    return written


def fragments(syntax: CallSyntax) -> list[str]:
    """Return fragments of a format's markup and of other text, to be joined in any order."""
    written = [*syntax.calls, *syntax.parameters, *syntax.around]
    filled = [
        text.replace("{name}", "f").replace("{key}", "a").replace("{id}", "1").replace("{any}", "") for text in written
    ]
    parts = [part for text in filled for part in text.replace("}", "{").split("{") if part]
    json_parts = [
        '{"name": "f", "arguments": {"a": "x"}}',
        '{"a": "',
        '", "n": ',
        "12",
        "}",
        "]",
        "[",
        '"',
        "'",
        "\\",
        ",",
        ":",
    ]
    whole = [called(text, syntax) for text in syntax.calls]
    return [
        *whole,
        *whole,
        *parts,
        *json_parts,
        "f",
        "f(a='x', n=2)",
        "<think>",
        "</think>",
        " ",
        "\n",
        "<",
        "é🙂",
        "some words ",
        "\x00",
    ]


@pytest.mark.parametrize("syntax", CALLS, ids=lambda syntax: syntax.name)
def test_events_do_not_depend_on_the_split(syntax: CallSyntax) -> None:
    chance = random.Random(f"cut {syntax.name}")
    markup, pieces = FormatMarkup(format_with(syntax)), fragments(syntax)
    calls = 0
    for _ in range(12):
        text = "".join(chance.choice(pieces) for _ in range(chance.randrange(1, 16)))
        whole = parse_pieces(ReplyParser(markup, TOOLS), [text])
        assert parse_pieces(ReplyParser(markup, TOOLS), cut(text, chance)).contents() == whole.contents(), text
        assert parse_pieces(ReplyParser(markup, TOOLS), text).contents() == whole.contents(), text
        for call in whole.calls:
            if call.ended:
                assert isinstance(json.loads(call.arguments), dict), text
        calls += sum(call.ended for call in whole.calls)
    assert calls > 0 or syntax.unmarked


def test_plain_text_is_unchanged() -> None:
    for format_ in (PLAIN, HERMES, CODER, HARMONY):
        for text in ("", " ", "a", "  a < b\n\n", "<thinks> <tool_calls> </", "{}[]", "\n\n"):
            assert parsed(text, format_, TOOLS).contents() == (text, "", [])


def test_event_positions_match_the_text_of_the_reply() -> None:
    text = "Well. <think> hm, yes </think>\n\n Done <tool_call>\n"
    parser = ReplyParser(FormatMarkup(HERMES), TOOLS)
    heard = [*parser.push(text), *parser.finish()]
    for one in heard:
        assert isinstance(one.event, TextDelta | ReasoningDelta)
        assert one.event.text == text[one.start : one.end]


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        (HERMES, 'I write <tool_call> and go on, {"name": "f"}'),
        (HERMES, "<tool_call>\n"),
        (HERMES, '<tool_call>\n{"name": "f"'),
        (HERMES, "<tool_call>\nno JSON\n</tool_cal"),
        (HERMES, '<tool_call>\n{"arguments": {"a": "x"}}'),
        (HERMES, '<tool_call>[{"name": 5}]'),
        (HERMES, r'<tool_call>{"name": "\ud800", "arguments": {}}'),
        (HERMES, r'<tool_call>{"name": "a\nb", "arguments": {}}'),
        (HERMES, f'<tool_call>{{"name": "{"f" * 300}", "arguments": {{}}}}'),
        (CODER, "<function=f> and <parameter=a>"),
        (CODER, "<function=>"),
        (HARMONY, "<|channel|> <|message|"),
        (format_with(BY_NAME["mistral"]), "[TOOL_CALLS] of what?"),
        (format_with(BY_NAME["llama"]), '{"name": "unknown", "parameters": {}}'),
        (format_with(BY_NAME["llama"]), '{"answer": 42}'),
        (format_with(BY_NAME["llama"]), 'Here: {"name": "f", "parameters": {}}'),
        (format_with(BY_NAME["lfm"]), "<|tool_call_start|>[1, 2] and"),
    ],
)
def test_invalid_calls_are_text(format_: ReplyFormat, text: str) -> None:
    told = parsed(text, format_, TOOLS)
    assert told.calls == []
    assert told.text == text


CALLED = [Call("f", "", '{"a": "x", "n": 2}', ended=True)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "x", "n": 2}, "name": "f"}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'f', 'arguments': {'a': 'x', 'n': 2,}}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\\", \\"n\\": 2}"}</tool_call>'),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": "x", "n": 2}}}'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": "x", "n": 2}}]<|/tool_call|>'),
        ("llama", '<|python_tag|>f.call(a="x", n=2)'),
        ("llama", '  {"name": "f", "parameters": {"a": "x", "n": 2}}'),
        ("tool-code", "```tool_code\nf(a='x', n=2)\n```"),
        ("function-gemma", "<start_function_call>call:f{a:<escape>x<escape>,n:2}<end_function_call>"),
        ("qwen-coder", "<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=n>2</parameter></function>"),
        (
            "glm",
            "<tool_call>f\n<arg_key>a</arg_key><arg_value>x</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2</arg_value></tool_call>",
        ),
        ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x", "n": 2}<|call|>'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "x", "n": 2}, "id": "abcdefghi"}]'),
    ],
)
def test_known_deviations_are_parsed(name: str, text: str) -> None:
    told = parsed(text, format_with(BY_NAME[name]), TOOLS)
    assert told.text.strip() == ""
    assert [(call.name, json.loads(call.arguments), call.ended) for call in told.calls] == [
        ("f", {"a": "x", "n": 2}, True)
    ]


def test_text_argument_is_streamed_and_may_contain_tags() -> None:
    parser = ReplyParser(FormatMarkup(CODER), TOOLS)
    parser.push("<function=f>\n<parameter=a>\n")
    said = [heard.event for heard in parser.push("one </parameter> two\n\n")]
    assert "".join(event.arguments for event in said) == "one </parameter> two\\n"  # type: ignore[union-attr]
    rest = heard_of_rest(parser, "\n</parameter>\n</function>")
    assert rest[-1] == ToolCallEnd(0)


def heard_of_rest(parser: ReplyParser, text: str) -> list[object]:
    return [heard.event for heard in (*parser.push(text), *parser.finish())]


def test_cut_off_call_has_no_end() -> None:
    for text in (
        '<tool_call>\n{"name": "f", "arguments": {"a": "x',
        '<tool_call>\n{"name": "f", "arguments": {"a": "x", "n": nothing here}} and so on',
    ):
        told = parsed(text, HERMES, TOOLS)
        assert [call.ended for call in told.calls] == [False]
        assert told.calls[0].arguments.startswith('{"a": "x')


def test_reply_ends_after_first_call_without_parallel_calls() -> None:
    parser = ReplyParser(FormatMarkup(HERMES), TOOLS, parallel=False)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
    events = heard_of_rest(parser, call + call + "more")
    assert [type(event) for event in events].count(ToolCallStart) == 1
    assert events[-1] == ToolCallEnd(0)
    assert parser.ended


@pytest.mark.parametrize("seed", range(3))
def test_everything_after_an_answer_mark_is_text(seed: int) -> None:
    text = 'Write <response> or <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> or <think>.'
    told = parsed(cut(f"<think>hm</think>\n<response>{text}", random.Random(seed)), GENERIC, TOOLS)
    assert told.contents() == (text, "hm", [])


@pytest.mark.parametrize("seed", range(3))
def test_generic_calls_are_parsed(seed: int) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "<response>"}}\n</tool_call>'
    told = parsed(cut(f"{call}\n{call}", random.Random(seed)), GENERIC, TOOLS)
    assert told.contents() == ("", "", [("f", '{"a": "<response>"}', True)] * 2)


@pytest.mark.parametrize(
    ("written", "format", "text"),
    [
        ("<respon", GENERIC, ""),
        ("<tool_c", GENERIC, ""),
        ("<response>a <", GENERIC, "a <"),
        ("<", HERMES, "<"),  # an answer without a mark may start like this
        ("a <tool_", HERMES, "a <tool_"),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_', HERMES, ""),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<to', HERMES, ""),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\na <', HERMES, "a <"),
    ],
)
def test_cut_off_markup_is_dropped(written: str, format: ReplyFormat, text: str) -> None:  # noqa: A002
    assert parsed(written, format, TOOLS).text == text
    assert parsed(list(written), format, TOOLS).text == text


def test_text_prefilled_in_the_prompt_is_not_repeated() -> None:
    assert parsed("hm</think>Yes", HERMES, TOOLS, opening="<think>\n").contents() == ("Yes", "hm", [])
    opening = '<tool_call>\n{"name": "f", "arguments": '
    told = parsed('{"a": "x"}}\n</tool_call>', HERMES, TOOLS, opening=opening)
    assert told.contents() == ("", "", [("f", '{"a": "x"}', True)])
    assert parsed("no", HERMES, TOOLS, opening=opening).text == "no"


def test_call_ids_of_the_model_are_kept() -> None:
    mistral = format_with(BY_NAME["mistral"])
    told = parsed('[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"a": "x"}[TOOL_CALLS]f[ARGS]{}', mistral, TOOLS)
    assert told.calls[0].id == "abcDEF123"
    assert len(told.calls[1].id) == 9
    assert told.calls[1].id.isalnum()


def test_invalid_call_ids_are_replaced() -> None:
    for written in (r"\ud800", "", r"a\u0000b", "x y", "9" * 300):
        told = parsed(f'<tool_call>{{"id": "{written}", "name": "f", "arguments": {{}}}}</tool_call>', HERMES, TOOLS)
        assert told.calls[0].id.isalnum()
        assert len(told.calls[0].id) == 9


def test_text_similar_to_calls_is_parsed_in_linear_time() -> None:
    for text in ("<tool_call>" * 4_000, '<tool_call>{"a": ' * 1_000, "<" * 20_000, "<tool_call>{'" + "' " * 2_000):
        assert parsed(text, HERMES, TOOLS).calls == []
    for text in ("<function=f>\n<parameter=a>" + "</parameter>" * 10_000, "<function=f>" + " " * 20_000):
        parsed(text, CODER, TOOLS)


CLOSED = [
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n', "</tool_call>"),
    (CODER, "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n", "</tool_call>"),
    (HERMES, "<think>Hm", "</think>"),
    (ReplyFormat(None, BY_NAME["hermes"]), '<tool_call>{"name": "f", "arguments": {}}', "</tool_call>"),
]


@pytest.mark.parametrize(("written", "said", "mark"), CLOSED)
def test_partial_end_mark_is_dropped_from_cut_off_reply(written: ReplyFormat, said: str, mark: str) -> None:
    def events(text: str, *, cut_off: bool) -> list[object]:
        parser = ReplyParser(FormatMarkup(written), TOOLS)
        return [one.event for one in (*parser.push(text), *parser.finish(cut_off=cut_off))]

    for size in range(1, len(mark)):
        texts = [it for it in events(said + mark[:size], cut_off=True) if isinstance(it, TextDelta)]
        assert texts == []
        thoughts = [it.text for it in events(said + mark[:size], cut_off=True) if isinstance(it, ReasoningDelta)]
        assert "".join(thoughts) in ("", "Hm")


def test_text_like_a_mark_is_kept_in_cut_off_reply() -> None:
    parser = ReplyParser(FormatMarkup(HERMES), TOOLS)
    heard = [*parser.push("if a <"), *parser.finish(cut_off=True)]
    assert "".join(one.event.text for one in heard if isinstance(one.event, TextDelta)) == "if a <"
