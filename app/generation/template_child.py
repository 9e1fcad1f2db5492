"""The program that renders chat templates, run in a child process by `app.generation.template`.

    python -I -S template_child.py LIMITS FOLDER...

LIMITS is a JSON object (see `TemplateLimits`). Each FOLDER contains jinja2 or one of its dependencies. A frame on stdin
or stdout is a 4-byte big-endian length, then JSON of that length in bytes. The first frame sent is `{"ready": true}`.
After that, every frame received is answered by one frame, until stdin ends.

    in    {"template": sha256, "source": text or absent, "now": ISO local time, "context": {name: value}}
    out   {"text": rendered}  or  {"error": kind, "detail": text, "line": of the template, or null}
          or  {"unknown": true}: send the request again, with the source

The program imports only the standard library and jinja2, to keep the code that runs beside an untrusted template small.
There are three layers of protection: the sandbox, the limits of this process, and the deadline of the parent process.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import math
import os
import re
import signal
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, BinaryIO, NamedTuple

if __name__ == "__main__":
    # the terminal sends these signals to this process as well, but only the parent handles them
    for name in {"SIGINT", "SIGHUP"} & signal.Signals.__members__.keys():
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    sys.path += sys.argv[2:]

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

_LENGTH = struct.Struct(">I")
_TEMPLATES_KEPT = 8  # maximum number of compiled templates in the cache: a user switches between a few models
_DETAIL_CHARS = 1000
_POWER_BITS = 4096
_REPEATED_ITEMS = 1_000_000
_CONVERSION = re.compile(r"%(?:\([^()]*\))?([-+ #0-9.*]*)")
_WIDE = re.compile(r"\*|\d{7}")


class TemplateLimits(NamedTuple):
    """Limits that the parent sets."""

    memory_bytes: int  # limit of this process's address space, in bytes
    frame_bytes: int  # maximum size of one frame in either direction, in bytes
    text_chars: int  # maximum length of one rendered text, in characters
    seconds: float  # limit of CPU time per request, in seconds; this process then ends, even if the parent is gone


class TooCostly(Exception):
    """The template exceeded a limit."""


class RaisedByTemplate(jinja2.TemplateError):
    """The template called `raise_exception` to refuse the conversation."""


# ---- operations of a template


def _check_repeat(left: object, right: object) -> None:
    for items, count in ((left, right), (right, left)):
        if isinstance(items, Sequence) and isinstance(count, int) and len(items) * count > _REPEATED_ITEMS:
            raise TooCostly(f"'*' would make {len(items) * count:,} items; the limit is {_REPEATED_ITEMS:,}")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _POWER_BITS:
        raise TooCostly(f"'*' would make a number of more than {_POWER_BITS:,} bits")


def _check_power(base: object, exponent: object) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _POWER_BITS:
        raise TooCostly(f"'**' would make a number of more than {_POWER_BITS:,} bits")


def _check_format(pattern: object, _arguments: object) -> None:
    if isinstance(pattern, str) and any(_WIDE.search(found[1]) for found in _CONVERSION.finditer(pattern)):
        raise TooCostly("'%' has a width that is too large or variable")


_CHECKS: dict[str, Callable[[object, object], None]] = {"*": _check_repeat, "**": _check_power, "%": _check_format}


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with checks before operators that can produce very large results."""

    intercepted_binops = frozenset(_CHECKS)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        _CHECKS[operator](left, right)
        return super().call_binop(context, operator, left, right)


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training. Here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _DictMaker:
    """A template's `dict`: creates dicts, but gives no access to the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """A template's `namespace`, which rejects names with a leading underscore."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        for name in dict(*args, **kwargs):
            _check_name(name)
        super().__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not contain the name {name!r}")


def _raise_exception(message: object) -> None:
    raise RaisedByTemplate(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _format(pattern: Any, *args: Any, **kwargs: Any) -> Any:
    _check_format(pattern, args)
    return jinja2.filters.do_format(pattern, *args, **kwargs)


def sandbox() -> Sandbox:
    """Return the environment that chat templates expect, as transformers defines it."""
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
    environment.filters |= {"tojson": _to_json, "format": _format}
    environment.globals |= {"raise_exception": _raise_exception, "dict": _DictMaker(), "namespace": _Namespace}
    return environment


# ---- requests


class Renderer:
    """Compiles and caches templates, and renders them."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._environment = sandbox()
        self._compiled: OrderedDict[str, jinja2.Template] = OrderedDict()

    def answer(self, frame: bytes) -> bytes:
        """Return the answer to a frame. A failure is an answer as well."""
        try:
            request = json.loads(frame)
            template = self._template(request["template"], request.get("source"))
            reply = {"unknown": True} if template is None else {"text": self._render(template, request)}
            body = json.dumps(reply, ensure_ascii=False).encode()
            if len(body) > self._limits.frame_bytes:
                raise TooCostly(f"the text grew past {self._limits.frame_bytes:,} bytes")
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            return json.dumps(_failure(error)).encode()
        return body

    def _template(self, digest: str, source: str | None) -> jinja2.Template | None:
        if digest not in self._compiled:
            if source is None:
                return None
            self._compiled[digest] = self._environment.from_string(source)
            if len(self._compiled) > _TEMPLATES_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(digest)
        return self._compiled[digest]

    def _render(self, template: jinja2.Template, request: Mapping[str, Any]) -> str:
        now = datetime.fromisoformat(request["now"])
        pieces, size = [], 0
        for piece in template.generate({"strftime_now": now.strftime} | request["context"]):
            pieces.append(piece)
            size += len(piece)
            if size > self._limits.text_chars:
                raise TooCostly(f"the text grew past {self._limits.text_chars:,} characters")
        return "".join(pieces)


# The first matching class gives the kind of the failure. The parent has a message for each kind.
_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (jinja2.TemplateSyntaxError, "syntax"),
    (RaisedByTemplate, "raised"),
    (jinja2.exceptions.SecurityError, "security"),
    (jinja2.UndefinedError, "undefined"),
    (MemoryError, "memory"),
    (TooCostly, "costly"),
    (RecursionError, "costly"),
    (OverflowError, "costly"),
)


def _failure(error: Exception) -> dict[str, str | int | None]:
    kind = next((kind for cls, kind in _KINDS if isinstance(error, cls)), "failed")
    detail = str(error) if kind != "failed" else f"{type(error).__name__}: {error}"
    line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else _template_line(error)
    return {"error": kind, "detail": detail[:_DETAIL_CHARS], "line": line}


def _template_line(error: Exception) -> int | None:
    """Return the innermost template line in the traceback. jinja2 puts the template's line numbers there."""
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


# ---- the process

# Modules that Python and jinja2 import on first use, when this process can no longer open files.
_LATE_MODULES = ("encodings.unicode_escape", "jinja2.constants", "jinja2.debug", "pprint", "unicodedata")


def lock_down(limits: TemplateLimits) -> None:
    """Give up the rights that rendering does not need. If the OS lacks a limit, the parent's deadline remains."""
    os.umask(0o077)
    if sys.platform != "win32":
        import resource

        for module in _LATE_MODULES:
            importlib.import_module(module)
        for kind, most in (
            (resource.RLIMIT_AS, limits.memory_bytes),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_NOFILE, 0),  # no more files, sockets, or programs can be opened
        ):
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, (most, most))


def _watch(seconds: float) -> None:
    """End this process after about `seconds` more of CPU time, in case the parent is gone."""
    if sys.platform == "win32":
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), hard))


def _read(stream: BinaryIO, limits: TemplateLimits) -> bytes | None:
    """Return the next frame, or None at the end of the stream."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size or (size := _LENGTH.unpack(header)[0]) > limits.frame_bytes:
        return None
    return stream.read(size)


def _write(stream: BinaryIO, frame: bytes) -> None:
    stream.write(_LENGTH.pack(len(frame)) + frame)
    stream.flush()


def main(limits: TemplateLimits, stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Answer requests until `stdin` ends."""
    renderer = Renderer(limits)
    lock_down(limits)
    gc.freeze()
    _write(stdout, b'{"ready": true}')
    while (frame := _read(stdin, limits)) is not None:
        _watch(limits.seconds)
        _write(stdout, renderer.answer(frame))
        faulthandler.cancel_dump_traceback_later()
        gc.collect()  # a failed render leaves a cycle of frames, which would keep all of its memory


if __name__ == "__main__":
    main(TemplateLimits(**json.loads(sys.argv[1])), sys.stdin.buffer, sys.stdout.buffer)
