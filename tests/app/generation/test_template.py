"""Template rendering and its child process: the result equals transformers, and hostile templates do no harm."""

import ast
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import app.generation.template as subject
from app.errors import TemplateError
from app.generation.conversation import Json, Message, ToolCall
from app.generation.template import ChatTemplateRenderer

REPOSITORY = Path(subject.__file__).parents[2]
CHILD = Path(subject.__file__).with_name("template_child.py")
NOW = datetime(2026, 3, 4, 5, 6, 7, 891)
GOOD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
HELLO = [Message("user", "hello")]


@pytest.fixture(scope="module")
def renderer() -> Iterator[ChatTemplateRenderer]:
    """A renderer with the default limits."""
    with ChatTemplateRenderer() as renderer:
        yield renderer


@pytest.fixture(scope="module")
def patient() -> Iterator[ChatTemplateRenderer]:
    """A renderer with a late deadline, so that a failure never comes from the deadline."""
    with ChatTemplateRenderer(seconds=100) as renderer:
        yield renderer


def refusal(renderer: ChatTemplateRenderer, template: str, **options: Any) -> str:
    """Return the message of the error that `template` raises, and check that the message is safe to print."""
    with pytest.raises(TemplateError) as caught:
        renderer.render(template, HELLO, **options)
    assert caught.value.message.isprintable()
    assert caught.value.remedy
    return caught.value.message


def assert_works(renderer: ChatTemplateRenderer) -> None:
    assert renderer.render(GOOD, HELLO) == "<user>hello"


# ---- comparison with transformers


class Conversation(NamedTuple):
    messages: list[Message]
    tools: list[dict[str, Json]] | None = None
    add_generation_prompt: bool = True
    variables: dict[str, Json] | None = None


WEATHER: dict[str, Json] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather\'s <forecast> & "more", größer ☂',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city"},
                "days": {"type": "integer", "enum": [1, 2, 3]},
                "units": {"type": ["string", "null"], "default": None},
            },
            "required": ["city"],
        },
    },
}
CLOCK: dict[str, Json] = {
    "type": "function",
    "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}},
}
USER = Message("user", "Wie wird's in Zürich? 你好 🙂 <b>&amp;</b>")
CALL = ToolCall("get_weather", {"city": "Zürich", "days": 2, "units": None}, "call00001")
ROUND_TRIP = [
    USER,
    Message("assistant", tool_calls=(CALL,)),
    Message("tool", '{"sky": "klar", "°C": 22.5}', tool_call_id="call00001", name="get_weather"),
    Message("assistant", "It is 22.5 °C."),
    Message("user", "  And\n\ntomorrow?  "),
]
PARALLEL = [
    USER,
    Message("assistant", "Let me see.", reasoning="Two calls.", tool_calls=(CALL, ToolCall("now", {}, "call00002"))),
    Message("tool", "22", tool_call_id="call00001", name="get_weather"),
    Message("tool", "12:00", tool_call_id="call00002", name="now"),
]
THOUGHT = [USER, Message("assistant", "Hello!", reasoning="A greeting.\n"), Message("user", "More")]
TURNS = [Message("system", "Be <brief> & kind."), USER, Message("assistant", "Hello!"), Message("user", "More")]

CONVERSATIONS = {
    "one user message": Conversation([USER]),
    "system and turns": Conversation(TURNS),
    "tools": Conversation([USER], tools=[WEATHER, CLOCK]),
    "tool round trip": Conversation(ROUND_TRIP, tools=[WEATHER]),
    "with a system message": Conversation([Message("system", "Use tools."), *ROUND_TRIP], tools=[WEATHER, CLOCK]),
    "parallel calls with reasoning": Conversation(PARALLEL, tools=[WEATHER, CLOCK]),
    "thinking on": Conversation(THOUGHT, variables={"enable_thinking": True}),
    "thinking off": Conversation(THOUGHT, variables={"enable_thinking": False}),
    "thinking off with tools": Conversation(ROUND_TRIP, tools=[WEATHER], variables={"enable_thinking": False}),
    "no generation prompt": Conversation(TURNS[:3], add_generation_prompt=False),
    "developer message": Conversation([Message("developer", "Be brief."), USER]),
}


class FixedDatetime(datetime):
    """A `datetime` with a fixed time."""

    @classmethod
    def now(cls, tz: object = None) -> "FixedDatetime":
        return cls.fromisoformat(NOW.isoformat())


def transformers_text(template: str, conversation: Conversation, variables: dict[str, Any]) -> str | None:
    """Return the text that transformers renders, or None if it refuses."""
    from transformers.utils import chat_template_utils

    try:
        rendered = chat_template_utils.render_jinja_template(
            [[message.to_template() for message in conversation.messages]],
            tools=conversation.tools,  # type: ignore[arg-type]
            chat_template=template,
            add_generation_prompt=conversation.add_generation_prompt,
            **variables,
        )
    except Exception:  # noqa: BLE001 - whatever a template raises
        return None
    return rendered[0][0]


def our_text(
    renderer: ChatTemplateRenderer, template: str, conversation: Conversation, variables: dict[str, Json]
) -> str | None:
    """Return the text that ChatTemplateRenderer renders, or None if it refuses."""
    try:
        return renderer.render(
            template,
            conversation.messages,
            tools=conversation.tools,
            add_generation_prompt=conversation.add_generation_prompt,
            variables=variables,
        )
    except TemplateError:
        return None


@pytest.mark.share(1)
@pytest.mark.parametrize("first", range(4))
def test_real_templates_render_like_in_transformers(
    llama_cpp_models: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Each template has its own test, so that both renderers compile it only once. Each run tests a quarter of them."""
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", FixedDatetime)
    templates = sorted((llama_cpp_models / "templates").glob("*.jinja"))
    assert len(templates) == 70
    rendered, different = Counter[str](), []
    with ChatTemplateRenderer(seconds=100, clock=lambda: NOW) as renderer:
        for path, (name, conversation) in itertools.product(templates[first::4], CONVERSATIONS.items()):
            template = path.read_text(encoding="utf-8")
            variables: dict[str, Json] = {"bos_token": "<s>", "eos_token": "</s>", **(conversation.variables or {})}
            expected = transformers_text(template, conversation, variables)
            rendered[name] += expected is not None
            if our_text(renderer, template, conversation, variables) != expected:
                different.append((path.stem, name))
    assert different == []
    # A template may refuse a conversation in both renderers, but most templates must render it.
    assert all(rendered[name] > 10 for name in CONVERSATIONS)


@pytest.mark.parametrize(
    "template",
    [
        "a\n  {% if true %}\n  b\n  {% endif %}\nc\n",
        "{% set x = 1 %}{% generation %}{{ x }}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration -%}{% endfor %}",
        "{% for i in '12345' %}{% if i=='2' %}{% continue %}{% elif i=='4' %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{{ messages|tojson }}{{ messages|tojson(indent=2) }}",
        "{{ messages|tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}",
        "{{ tools is none }}{{ documents is none }}{{ tools is defined }}{{ nothing is defined }}{{ nothing }}",
        "{{ dict(a=1, b=2) }}{{ dict.fromkeys(['a'], 3) }}{{ dict.keys is defined }}",
        "{% set ns = namespace(a=1, self=2) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.self }}",
        "{% set ns = namespace({'a': 1}) %}{{ ns.a }}",
        "{% set ns = namespace(_a=1) %}",
        "{% set ns = namespace() %}{% set ns._a = 1 %}",
        "{{ strftime_now('%Y-%m-%d %H:%M:%S %f %A %B %Z') }}",
        "{{ '%-5s|%5.2f|%(a)s' % ('x', 1.5) }}",
        "{{ '%-5s|%05d %%'|format('x', 7) }}{{ 2 ** 10 }}{{ 3 * 'ab' }}{{ [0] * 3 }}{{ 7 % 4 }}{{ 2.5 * 2 }}",
        "{{ '{:>5}|{a}'.format(1, a='b') }}{{ 'a' 'b' }}{{ '\\u00e9\\N{SNOWMAN}\\x41' }}",
        "{{ messages[0].content|upper|trim|replace('H', 'J')|urlize }}{{ messages|pprint }}",
        "{{ messages.append(1) }}",
        "{{ [1].pop() }}",
        "{{ [1] * 'a' }}",
    ],
)
def test_template_features_render_like_in_transformers(
    patient: ChatTemplateRenderer, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", FixedDatetime)
    monkeypatch.setattr(patient, "_clock", lambda: NOW)
    conversation = Conversation([Message("user", "Hé <b>'\"&"), Message("assistant", "ok", reasoning="why")])
    assert our_text(patient, template, conversation, {}) == transformers_text(template, conversation, {})


# ---- hostile templates

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ ''|attr('__cla' ~ 'ss__') }}",
    "{{ ['']|map(attribute='__class__')|list }}",
    "{{ ['']|map('attr', '__class__')|list }}",
    "{{ [[1]]|sum(attribute='__class__') }}",
    "{{ messages|groupby('__class__')|map('first')|list }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0[__class__]}'.format('') }}",
    "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
    "{{ (['{0.__class__}']|map(attribute='format')|first)(1) }}",
    "{{ ('{0.__class__}'|attr('format'))(1) }}",
    "{{ '%s' % ''.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__self__ }}",
    "{{ range.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace.mro() }}",
    "{{ dict.__class__ }}",
    "{{ dict.__call__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__code__ }}",
    "{% for x in messages %}{{ loop.__class__ }}{% endfor %}",
    "{% for x in messages %}{{ loop._iterator }}{% endfor %}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "{% set namespace.x = 1 %}",
    "{{ (1).__class__ }}",
    "{{ none.__class__ }}",
    "{{ nothing.__class__ }}",
    "{{ nothing.__init__ }}",
    "{{ ''.encode().__class__ }}",
    "{{ (messages|map('string')).gi_frame.f_globals }}",
    "{{ messages|map('string')|attr('gi_code') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(x=1) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages.sort() }}",
    "{{ messages.__setitem__(0, 1) }}",
    "{% include '/etc/passwd' %}",
    "{% include ['/etc/passwd'] ignore missing %}",
    "{% import 'os' as os %}",
    "{% from 'os' import system %}",
    "{% extends '/etc/passwd' %}",
    "{{ __import__('os').system('id') }}",
    "{{ os.system('id') }}",
    "{{ open('/etc/passwd').read() }}",
    "{% do messages.append(1) %}",
    "{% debug %}",
    "{{ (x for x in messages) }}",
    "{{ messages|tojson(default=''.__class__) }}",
    "{{ caller.__globals__ }}",
]

BOMBS = [
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [0] * 10**9 }}",
    "{{ ('a',) * 2**40 }}",
    "{{ 10**(10**10) }}",
    "{{ (7**1300) * (7**1300) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%.999999999f' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%(a)999999999d' % {'a': 1} }}",
    "{{ '%999999999d'|format(1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ '\\t'.expandtabs(10**9) }}",
    "{{ 'a'|center(10**9) }}",
    "{{ 'a\\nb'|indent(10**9) }}",
    "{{ [1]|batch(10**9, 'x')|list }}",
    "{{ range(10**9)|list }}",
    "{{ range(10**30) }}",
    "{% set ns = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1, 2]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a' * 900000) %}{% for i in [1] * 99 %}{% set ns.x = [ns.x] * 9 %}{% endfor %}{{ ns.x }}",
    "{{ ('a' * 10**6).replace('a', 'a' * 10**6) }}",
    "{{ ('a' * 10**6)|join('b' * 10**6) }}",
    "{{ [[1]]|tojson(indent=10**9) }}",
    "{% for i in range(100000) %}{{ 'a' * 100 }}{% endfor %}",
    "{% set x %}{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}",
    "{{ 'a' * 900000 }}" * 6,
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "[" * 9000 + "]" * 9000 + " }}",
    "{{ " + "not " * 9000 + "x }}",
    "{{ x" + ".a" * 9000 + " }}",
    "{{ x" + "|upper" * 9000 + " }}",
    "{{ 1" + " + 1" * 9000 + " }}",
    "{% if x %}" * 4000 + "{% endif %}" * 4000,
    "{% for x in messages %}" * 900 + "{% endfor %}" * 900,
    "{{ " + "9" * 50_000 + " }}",
    "{{ '" + "9" * 50_000 + "'|int(0) }}{{ 1/0 }}",
]
TOO_LONG = ["x" * (10 << 20), "{{ 1 }}" * (10 << 20)]

LOOPS = [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ lipsum(n=10**6) }}",
    "{{ 1|round(10**9, 'ceil') }}",
    "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{% set y = x|upper|lower %}{% endfor %}",
]


HARM = """
import json, resource, sys
from app.generation.conversation import Message
from app.generation.template import ChatTemplateRenderer
from app.errors import TemplateError
bombs, good = json.load(sys.stdin)
hello = [Message("user", "hello")]
defused = []
with ChatTemplateRenderer(seconds=100) as renderer:
    renderer.render("x", [])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for bomb in bombs:
        try:
            renderer.render(bomb, hello)
            defused.append(("", ""))
        except TemplateError as error:
            defused.append((error.message, error.remedy))
        defused[-1] += (renderer.render(good, hello),)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([defused, after - before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""


class Defused(NamedTuple):
    """The error of an expensive template (empty if there was none), and the text of a harmless template after it."""

    message: str
    remedy: str
    text_after: str


class Harm(NamedTuple):
    """The effects of running all expensive templates, one after another, in a separate program."""

    defused: list[Defused]
    parent_grew: int  # memory growth of the parent process in bytes
    child_took: int  # memory that the child used, in bytes


@pytest.fixture(scope="module")
def harm() -> Harm:
    given = json.dumps([BOMBS, GOOD])
    done = subprocess.run(
        [sys.executable, "-c", HARM], cwd=REPOSITORY, input=given, capture_output=True, text=True, check=True
    )
    defused, *kilobytes = json.loads(done.stdout)
    return Harm([Defused(*one) for one in defused], *(number << 10 for number in kilobytes))


def assert_gets_nothing(renderer: ChatTemplateRenderer, template: str) -> None:
    """Check that `template` fails or renders an undefined value, and that the renderer still works."""
    try:
        assert renderer.render(template, HELLO).capitalize() in ("", "[undefined]")
    except TemplateError as error:
        assert "took longer" not in error.message
    assert_works(renderer)


@pytest.mark.parametrize("template", ESCAPES)
def test_sandbox_escapes_fail(patient: ChatTemplateRenderer, template: str) -> None:
    assert_gets_nothing(patient, template)


@pytest.mark.share(15)
@pytest.mark.parametrize("number", range(len(BOMBS)), ids=[f"{n} {bomb[:40]}" for n, bomb in enumerate(BOMBS)])
def test_expensive_templates_are_refused_before_the_deadline(harm: Harm, number: int) -> None:
    defused = harm.defused[number]
    assert "took longer" not in defused.message
    assert defused.message.isprintable()
    assert defused.remedy
    assert defused.text_after == "<user>hello"


@pytest.mark.parametrize("template", TOO_LONG, ids=["text", "tags"])
def test_long_templates_are_refused(patient: ChatTemplateRenderer, template: str) -> None:
    assert "took longer" not in refusal(patient, template)
    assert_works(patient)


def test_templates_are_accepted_up_to_the_limit_of_their_length(patient: ChatTemplateRenderer) -> None:
    longest = "x" * subject.MAX_TEMPLATE_BYTES
    assert patient.render(longest, HELLO) == longest
    assert "the limit is 65,536" in refusal(patient, f"{longest}x")


@pytest.mark.parametrize(
    "template",
    ["{{ 'a' * 1000001 }}", "{{ 1000001 * [0] }}", "{{ 2**3000 * 2**3000 }}", "{{ 2**5000 }}", "{{ '%1000000d' % 1 }}"],
)
def test_operators_with_large_results_are_refused(patient: ChatTemplateRenderer, template: str) -> None:
    assert "exceeds its limits" in refusal(patient, template)


@pytest.mark.share(2)
@pytest.mark.parametrize("template", LOOPS)
def test_endless_templates_are_killed(renderer: ChatTemplateRenderer, template: str) -> None:
    assert "took longer than 1 s" in refusal(renderer, template)
    assert_works(renderer)


def test_attacks_within_other_constructs_fail(patient: ChatTemplateRenderer, mutations: int) -> None:
    """Attacks within other constructs, nested twice, fail as well."""
    wrappers = [
        "%s",
        "{%% for m in messages %%}%s{%% endfor %%}",
        "{%% macro w() %%}%s{%% endmacro %%}{{ w() }}",
        "{%% macro w() %%}{{ caller() }}{%% endmacro %%}{%% call w() %%}%s{%% endcall %%}",
        "{%% set x %%}%s{%% endset %%}{{ x }}",
        "{%% filter upper %%}%s{%% endfilter %%}",
        "{%% generation %%}%s{%% endgeneration %%}",
        "{%% if messages %%}%s{%% endif %%}",
        "{%% with y = 1 %%}%s{%% endwith %%}",
        "{%% autoescape true %%}%s{%% endautoescape %%}",
        "{%% block b %%}%s{%% endblock %%}",
    ]
    attacks = [attack for attack in ESCAPES + BOMBS if len(attack) < 1000]
    print(f"seed {(seed := random.randrange(1 << 32))}")
    choose = random.Random(seed)
    for _ in range(mutations // 20):
        outer, inner = choose.sample(wrappers, 2)
        assert_gets_nothing(patient, outer % (inner % choose.choice(attacks)))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% raw %}{{ ''.__class__ }}{% endraw %}", "{{ ''.__class__ }}"),
        ("{{ '__class__' }}", "__class__"),
        ("{{ ['{0.__class__}']|map('format', 1)|list }}", None),
        ("{{ nothing }}", ""),
        ("", ""),
        ("{{ 0 * 'a' }}{{ -10**9 * 'a' }}", ""),
    ],
)
def test_harmless_text_is_unchanged(patient: ChatTemplateRenderer, template: str, text: str | None) -> None:
    if text is None:
        refusal(patient, template)
    else:
        assert patient.render(template, HELLO) == text


def test_memory_of_both_processes_is_limited(harm: Harm) -> None:
    assert harm.parent_grew < 32 << 20
    assert 32 << 20 < harm.child_took < subject.MEMORY_BYTES  # the child used more than 32 MiB before it was stopped


def test_memory_of_compiled_templates_is_released() -> None:
    """A compiled template keeps its constants, which may leave too little memory for another template."""
    needy = "{{ 'a'.ljust(130000000)|length }}"
    with ChatTemplateRenderer(seconds=100) as renderer:
        for length in (40_000_000, 40_000_001, 40_000_002):
            greedy = "{% if not messages %}{{ 'a'|center(LENGTH) }}{% endif %}".replace("LENGTH", str(length))
            assert renderer.render(greedy, HELLO) == ""
        assert "needs more memory" in refusal(renderer, needy)
        assert renderer.render(needy, HELLO) == "130000000"


def test_memory_of_failed_renders_is_released(patient: ChatTemplateRenderer) -> None:
    for _ in range(20):
        assert "division by zero" in refusal(patient, "{% set x = 'a'.ljust(90000000) %}{{ 1 / 0 }}")


# ---- limits and errors


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\nb\n{% foo %}", "syntax error (line 3): Encountered unknown tag 'foo'."),
        ("{{ 'unclosed }}", "syntax error (line 1)"),
        ("{{ x|nofilter }}", "syntax error (line 1): No filter named 'nofilter'."),
        ("{{ raise_exception('roles\x1b[31m must\nalternate') }}", "refused this conversation"),
        ("\n{{ raise_exception('roles must alternate') }}", "(line 2): roles must alternate"),
        ("{{ raise_exception('x' * 100000) }}", "xxxx"),
        ("{{ messages[0].name.first }}", "undefined name (line 1): 'dict object' has no attribute 'name'"),
        ("{{ ''.__class__.x }}", "not allowed (line 1): access to attribute '__class__'"),
        ("{% for i in range(100000) %}{{ 'a' * 100 }}{% endfor %}", "the text grew past 4,194,304 characters"),
        ("{% for i in range(4) %}{{ '\\x00' * 1000000 }}{% endfor %}", "the text grew past 16,777,216 bytes"),
        ("{{ range(10**6) }}", "Range too big"),
        ("{{ 'a' * 10**10 }}", "'*' would make 10,000,000,000 items; the limit is 1,000,000"),
        ("{{ 2**9999 }}", "'**' would make a number of more than 4,096 bits"),
        ("{{ (7**1300) * (7**1300) }}", "'*' would make a number of more than 4,096 bits"),
        ("{{ '%999999999d' % 1 }}", "'%' has a width that is too large"),
        ("{{ '%(a).999999999f'|format(a=1) }}", "'%' has a width that is too large"),
        ("{{ '%*d' % (9, 1) }}", "or variable"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ 1 / 0 }}", "failed (line 1): ZeroDivisionError: division by zero"),
        ("{{ '\\ud800' }}", "failed: UnicodeEncodeError"),
        ("{{ 'a'.ljust(10**9) }}", "needs more memory than its limit"),
        ("a" * (64 << 10) + "b", "65,537 bytes; the limit is 65,536"),
        ("\ud800", "not valid text"),
    ],
)
def test_error_messages_describe_the_failure(patient: ChatTemplateRenderer, template: str, message: str) -> None:
    shown = refusal(patient, template)
    assert message in shown
    assert len(shown) < 700


@pytest.mark.parametrize("template", [None, 1, b"{{ 1 }}", ["{{ 1 }}"], {"default": "{{ 1 }}"}])
def test_non_text_template_is_refused(patient: ChatTemplateRenderer, template: Any) -> None:
    assert type(template).__name__ in refusal(patient, template)


def nested(depth: int) -> list[Any]:
    outer: list[Any] = []
    for _ in range(depth):
        outer = [outer]
    return outer


@pytest.mark.parametrize(
    "value",
    [
        nested(100_000),
        b"bytes",
        {1, 2},
        object(),
        "\ud800",
        {("a",): 1},
        "x" * subject.MAX_FRAME_BYTES,
    ],
    ids=["nesting", "bytes", "set", "object", "surrogate", "tuple key", "size"],
)
def test_invalid_inputs_are_refused(patient: ChatTemplateRenderer, value: Any) -> None:
    refusal(patient, GOOD, variables={"extra": value})
    refusal(patient, GOOD, tools=[value])
    assert_works(patient)


def test_variables_cannot_replace_conversation_inputs(patient: ChatTemplateRenderer) -> None:
    assert patient.render("{{ bos_token }}{{ self_ }}", [], variables={"bos_token": "<s>", "self_": 1}) == "<s>1"
    assert "'messages'" in refusal(patient, GOOD, variables={"messages": []})


def test_compiled_templates_are_cached(patient: ChatTemplateRenderer) -> None:
    templates = [f"{{{{ messages[0].content }}}} {n}" for n in range(20)]  # more templates than the child caches
    for _ in range(2):
        for n, template in enumerate(templates):
            assert patient.render(template, HELLO) == f"hello {n}"


def test_largest_conversation_is_within_the_limits(patient: ChatTemplateRenderer) -> None:
    text = "🙂" * (subject.MAX_TEXT_CHARS - 100)
    with pytest.raises(TemplateError, match="The conversation has"):
        patient.render(GOOD, [Message("user", text + "🙂" * 100)])
    assert patient.render(GOOD, [Message("user", text)]) == f"<user>{text}"


# ---- the child process


def test_threads_get_their_own_answers(patient: ChatTemplateRenderer) -> None:
    def one(n: int) -> bool:
        return patient.render(GOOD + f"{n % 7}", [Message("user", str(n))]) == f"<user>{n}{n % 7}"

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(400)))


def test_close_ends_the_child_and_a_render_starts_another() -> None:
    renderer = ChatTemplateRenderer(seconds=100)
    renderer.close()
    renderer.start()
    renderer.start()
    assert_works(renderer)
    renderer.close()
    renderer.close()
    assert_works(renderer)
    renderer.close()


def test_interrupted_render_does_not_affect_the_next() -> None:
    with ChatTemplateRenderer(seconds=100) as renderer:
        assert_works(renderer)
        interrupt = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))

        def interrupted_render() -> None:
            interrupt.start()
            try:
                renderer.render(LOOPS[0], HELLO)
            finally:
                interrupt.cancel()

        with pytest.raises(KeyboardInterrupt):
            interrupted_render()
        assert_works(renderer)


def child_command(**limits: float) -> list[str]:
    folders = {str(Path(module.__file__ or "").parents[1]) for module in map(__import__, ("jinja2", "markupsafe"))}
    allowed = {"memory_bytes": 1 << 28, "frame_bytes": 1 << 20, "text_chars": 1 << 20, "seconds": 1.0, **limits}
    return [sys.executable, "-I", "-S", str(CHILD), json.dumps(allowed), *folders]


def framed(value: object) -> bytes:
    body = json.dumps(value).encode()
    return len(body).to_bytes(4, "big") + body


def request(source: str) -> dict[str, object]:
    return {"template": "a", "source": source, "now": NOW.isoformat(), "context": {"messages": []}}


def test_child_ends_when_its_parent_dies() -> None:
    done = subprocess.run(child_command(), input=framed(request("x")), capture_output=True, timeout=100, check=False)
    assert done.returncode == 0
    assert done.stdout == framed({"ready": True}) + framed({"text": "x"})


def test_child_in_a_loop_ends_when_its_parent_dies() -> None:
    done = subprocess.run(
        child_command(), input=framed(request(LOOPS[0])), capture_output=True, timeout=100, check=False
    )
    assert done.returncode != 0
    assert done.stdout == framed({"ready": True})


@pytest.mark.parametrize("frame", [b"{", b"[]", b"1", b"{}", b"\xff", b'{"template": [], "source": 1}', b"[" * 99_999])
def test_child_answers_malformed_frames_with_an_error(frame: bytes) -> None:
    sent = len(frame).to_bytes(4, "big") + frame + framed(request("x"))
    done = subprocess.run(child_command(), input=sent, capture_output=True, timeout=100, check=False)
    assert b'"error": ' in done.stdout
    assert done.stdout.endswith(framed({"text": "x"}))


LOCKED = """
import sys
from app.generation.template_child import TemplateLimits, lock_down
lock_down(TemplateLimits(1 << 28, 1, 1, 1))
for attempt in (
    lambda: open("/dev/null"),
    lambda: __import__("socket").socket(),
    lambda: __import__("os").pipe(),
    lambda: __import__("subprocess").run(["true"]),
    lambda: bytearray(1 << 28),
):
    try:
        attempt()
    except (OSError, ImportError, MemoryError):
        print("refused")
"""


def test_template_that_escapes_the_sandbox_cannot_open_files() -> None:
    done = subprocess.run([sys.executable, "-c", LOCKED], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"] * 5


def test_child_imports_no_project_modules() -> None:
    nodes = list(ast.walk(ast.parse(CHILD.read_text(encoding="utf-8"))))
    imported = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {(node.module or "").split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    assert imported - sys.stdlib_module_names == {"jinja2"}


def test_parent_imports_no_jinja2() -> None:
    program = "import app.generation.template, sys; print('jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ---- an untrusted child process

IMPOSTOR = """
import os, sys, time
open({pid!r}, "w").write(str(os.getpid()))
for turn, part in enumerate({sent!r}):
    if turn:
        sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(4), "big"))
    sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()
if {stays!r}:
    time.sleep(1000)
"""
READY = framed({"ready": True})
LIES: dict[str, list[bytes]] = {
    "ends at once": [],
    "not ready": [framed({"ready": False}), framed({"text": "x"})],
    "greets with noise": [b"Traceback (most recent call last)"],
    "ends when asked": [READY],
    "half a header": [READY, b"\0\0"],
    "half a body": [READY, framed({"text": "x"})[:-1]],
    "too large": [READY, b"\xff\xff\xff\xff"],
    "empty": [READY, b"\0\0\0\0"],
    "not JSON": [READY, b"\0\0\0\1{"],
    "not UTF-8": [READY, b'\0\0\0\3"\xff"'],
    "a list": [READY, framed([1])],
    "nested": [READY, (200_000).to_bytes(4, "big") + b"[" * 200_000],
    "no text": [READY, framed({"text": 1})],
    "unheard of": [READY, framed({"error": "nonsense", "detail": "", "line": None})],
    "no detail": [READY, framed({"error": "failed"})],
    "never knows": [READY, framed({"unknown": True}), framed({"unknown": True})],
    "nothing said": [READY, framed({})],
    "pickle": [READY, b"\0\0\0\x05\x80\x04K\x01."],
}


@pytest.mark.parametrize("sent", LIES.values(), ids=LIES.keys())
def test_invalid_answers_raise_template_errors(tmp_path: Path, sent: list[bytes]) -> None:
    program, pid = tmp_path / "impostor.py", tmp_path / "pid"
    program.write_text(IMPOSTOR.format(pid=str(pid), sent=sent, stays=False), encoding="utf-8")
    with ChatTemplateRenderer(seconds=100, program=program) as renderer:
        refusal(renderer, GOOD)
        refusal(renderer, GOOD)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)  # the process is gone and not a zombie


def test_slow_child_is_killed(tmp_path: Path) -> None:
    program, pid = tmp_path / "impostor.py", tmp_path / "pid"
    program.write_text(IMPOSTOR.format(pid=str(pid), sent=[READY, b"\0"], stays=True), encoding="utf-8")
    with ChatTemplateRenderer(seconds=0.1, program=program) as renderer:
        assert "took longer than 0.1 s" in refusal(renderer, GOOD)
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


def test_child_killed_while_idle_is_replaced(tmp_path: Path) -> None:
    program, pid = tmp_path / "impostor.py", tmp_path / "pid"
    answers = [READY, *itertools.repeat(framed({"text": "x"}), 2)]
    program.write_text(IMPOSTOR.format(pid=str(pid), sent=answers, stays=True), encoding="utf-8")
    with ChatTemplateRenderer(seconds=100, program=program) as renderer:
        assert renderer.render(GOOD, HELLO) == "x"
        first = int(pid.read_text())
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert renderer.render(GOOD, HELLO) == "x"
        assert int(pid.read_text()) != first


def test_missing_program_is_an_error(tmp_path: Path) -> None:
    with ChatTemplateRenderer(seconds=100, program=tmp_path / "none.py") as renderer:
        assert "Starting the process" in refusal(renderer, GOOD)


def test_huge_answer_is_not_read(tmp_path: Path) -> None:
    program = tmp_path / "impostor.py"
    sent = [READY, (subject.MAX_FRAME_BYTES + 1).to_bytes(4, "big") + b"x" * 1000]
    program.write_text(IMPOSTOR.format(pid=str(tmp_path / "pid"), sent=sent, stays=False), encoding="utf-8")
    tracemalloc.start()
    try:
        with ChatTemplateRenderer(seconds=100, program=program) as renderer:
            refusal(renderer, GOOD)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
