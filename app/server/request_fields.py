"""Fields of requests: types that several dialects share, and tables of the documented fields.

A dialect has one table for each kind of request. It lists every field in the documents of its API and of other servers
with that API. The decoder applies the table, the tests check each row, and `docs/request-fields.md` prints it. Fields
without a row are ignored.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from app.server.http.errors import InvalidRequest
from engine.sampling_params import MAX_LOGPROBS, MAX_TEMPERATURE, DryParams

Json: TypeAlias = Any
Members: TypeAlias = dict[str, msgspec.Raw]  # members of a JSON object, each still encoded
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class Handling(enum.Enum):
    """How the server handles a field."""

    SUPPORTED = "supported"
    ALIAS = "alias"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    """A row of a table: one documented field of a request."""

    path: str  # path of the field, such as "options.num_ctx", or "messages[].name" for a member of list items
    handling: Handling
    sources: str  # the APIs that document it, such as "OpenAI, vLLM"
    example: Json  # a value that clients send; for a refused field, a value that is refused
    note: str = ""  # the effect, or why the field has none, or what to do instead
    target: str = ""  # name of the field that an alias means; both are in the same object
    neutral: tuple[Json, ...] = ()  # values of a refused field that have no effect and are accepted

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def supported(path: str, sources: str, example: Json, note: str = "") -> Field:
    """Return the row of a field that works as documented."""
    return Field(path, Handling.SUPPORTED, sources, example, note)


def alias(path: str, sources: str, example: Json, *, of: str, note: str = "") -> Field:
    """Return the row of an alias of the field `of`, which is in the same object.

    If a request sets both, the alias is ignored.
    """
    return Field(path, Handling.ALIAS, sources, example, note, target=of)


def ignored(path: str, sources: str, example: Json, why: str) -> Field:
    """Return the row of a field that cannot change a reply. `why` gives the reason."""
    return Field(path, Handling.IGNORED, sources, example, why)


def refused(path: str, sources: str, example: Json, instead: str, *, neutral: Sequence[Json] = ()) -> Field:
    """Return the row of a field that would change the reply and is not supported.

    `instead` tells the client what to do. Null and the `neutral` values are accepted.
    """
    return Field(path, Handling.REFUSED, sources, example, instead, neutral=tuple(neutral))


class FieldTable(Generic[BodyT]):
    """The documented fields of one kind of request, and the decoder of its bodies."""

    def __init__(self, kind: type[BodyT], base: Mapping[str, Json], fields: Sequence[Field]) -> None:
        """Set the type of the request and its rows.

        `kind` declares the supported fields with their types and bounds. `base` is a minimal valid body, to which the
        tests add the example of each field.
        """
        self.kind = kind
        self.base = base
        self.fields = fields
        self._typed = msgspec.json.Decoder(kind)
        self._active_rows: dict[str, list[Field]] = {}  # keyed by the path of the object
        for field in fields:
            if field.handling in (Handling.ALIAS, Handling.REFUSED) and "[]" not in field.path:
                self._active_rows.setdefault(field.parent, []).append(field)
        self._parents = [tuple(parent.split(".")) for parent in self._active_rows if parent]

    def decode(self, body: bytes) -> BodyT:
        """Decode a request body.

        Raises InvalidRequest for a refused field, and msgspec's errors for an invalid value; those name an alias as the
        client wrote it.
        """
        rewritten, replaced = self.rewrite(body)
        try:
            return self._typed.decode(rewritten)
        except msgspec.ValidationError as error:
            raise msgspec.ValidationError(_with_client_names(str(error), replaced)) from error

    def rewrite(self, body: bytes) -> tuple[bytes, Mapping[str, str]]:
        """Replace aliases by the names of their fields. Returns the body, and the path of the field for each replaced
        alias.

        Raises InvalidRequest for a refused field. A body that is not a JSON object is returned unchanged.
        """
        try:
            members = _MEMBERS.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return body, {}
        replaced: dict[str, str] = {}
        self._apply("", members, replaced)
        for steps in self._parents:
            self._apply_below(members, steps, ".".join(steps), replaced)
        return (msgspec.json.encode(members) if replaced else body), replaced

    def _apply_below(self, members: Members, steps: Sequence[str], parent: str, replaced: dict[str, str]) -> None:
        """Apply the rows of `parent` to the object at `steps`, if there is one."""
        if not steps:
            self._apply(parent, members, replaced)
            return
        try:
            below = _MEMBERS.decode(members[steps[0]])
        except (KeyError, msgspec.MsgspecError):
            return
        before = len(replaced)
        self._apply_below(below, steps[1:], parent, replaced)
        if len(replaced) > before:
            members[steps[0]] = msgspec.Raw(msgspec.json.encode(below))

    def _apply(self, parent: str, members: Members, replaced: dict[str, str]) -> None:
        for field in self._active_rows.get(parent, ()):
            raw = members.get(field.name)
            if raw is None or bytes(raw) == b"null":
                continue
            if field.handling is Handling.REFUSED:
                _refuse(field, raw)
            elif bytes(members.get(field.target, b"null")) == b"null":
                members[field.target] = members.pop(field.name)
                replaced[field.path] = f"{parent}.{field.target}" if parent else field.target


_MEMBERS = msgspec.json.Decoder(Members)


def _refuse(field: Field, raw: msgspec.Raw) -> None:
    """Raise InvalidRequest unless the value is one of the accepted values."""
    if msgspec.json.decode(raw) not in field.neutral:
        raise InvalidRequest(f"{field.path}: it is not supported", field.note, parameter=field.path)


def _with_client_names(message: str, replaced: Mapping[str, str]) -> str:
    for client_name, own_name in replaced.items():
        if f"`$.{own_name}" in message:
            return message.replace(f"`$.{own_name}", f"`$.{client_name}", 1)
    return message


ModelName: TypeAlias = Annotated[str, Meta(max_length=1024)]  # absent or null: the served model
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveCount: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Milliseconds: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
LogprobCount: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
MAX_SECONDS = 2.0**31
# seconds after its last request until a model is unloaded; below 0: it stays until its memory is needed
KeepAlive: TypeAlias = Annotated[float, Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
StopText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]


DRY_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's default

BreakerText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]


class DryFields(Struct, kw_only=True):
    """Fields of the DRY sampler, which penalizes repetitions."""

    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None  # 0 turns the sampler off
    dry_base: Annotated[float, Meta(ge=1, le=4)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    # -1: all tokens; 0 turns the sampler off
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    dry_sequence_breakers: Annotated[list[BreakerText], Meta(max_length=64)] | None = None

    def breakers(self) -> Sequence[str]:
        """Return the texts whose tokens end a repetition; none if the sampler is off."""
        if not self.dry_multiplier or self.dry_penalty_last_n == 0:
            return ()
        return DRY_BREAKERS if self.dry_sequence_breakers is None else self.dry_sequence_breakers

    def dry(self) -> DryParams | None:
        """Return the parameters except the breakers, or None if the sampler is off. Raises InvalidSampling."""
        if not self.dry_multiplier or self.dry_penalty_last_n == 0:
            return None
        given = {"base": self.dry_base, "allowed_length": self.dry_allowed_length}
        known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        last_n = None if self.dry_penalty_last_n == -1 else self.dry_penalty_last_n
        return DryParams(self.dry_multiplier, last_n=last_n, **known)
