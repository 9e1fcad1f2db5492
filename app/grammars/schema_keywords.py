"""The keywords of JSON Schema: which are enforced, which are refused, and which values they must have.

Other keywords are annotations (title, description, default, ...) or extensions of other tools (nullable, discriminator,
strict, x-...). They do not constrain values and are ignored.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeGuard

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Schema: TypeAlias = Mapping[str, Json]

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")

# The type that each keyword applies to. Values of other types always satisfy it.
TYPE_OF: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        "number",
    ),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("items", "prefixItems", "additionalItems", "minItems", "maxItems", "unevaluatedItems"), "array"),
    **dict.fromkeys(
        (
            "properties",
            "patternProperties",
            "additionalProperties",
            "unevaluatedProperties",
            "propertyNames",
            "required",
            "minProperties",
            "maxProperties",
        ),
        "object",
    ),
}
COMBINERS: Final = ("$ref", "allOf", "anyOf", "oneOf")
ENFORCED: Final = frozenset((*TYPE_OF, *COMBINERS, "type", "enum", "const"))

# Formats that the grammar library enforces.
FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
# Formats of JSON Schema that are not enforced. Any other name is an annotation.
UNENFORCED_FORMATS: Final = frozenset(
    (
        "idn-email",
        "idn-hostname",
        "uri-reference",
        "uri-template",
        "iri",
        "iri-reference",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    )
)


def unenforced(schema: Schema) -> str | None:
    """Return the first keyword of a schema that constrains values but cannot be enforced."""
    return next((key for key in schema if key in _REFUSED and not _REFUSED[key](schema)), None)


def mistake(keyword: str, value: Json) -> str | None:
    """Return the kind of value that an enforced keyword requires, or None if the value is right."""
    expected, fits = _VALUES[keyword]
    return None if fits(value) else expected


def number_in(schema: Schema, key: str) -> int | float | None:
    """Return the number under a keyword, or None if there is none."""
    value = schema.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def list_in(schema: Schema, key: str) -> Sequence[Json]:
    """Return the list under a keyword. Empty if there is none."""
    value = schema.get(key)
    return value if is_list(value) else ()


def texts_in(schema: Schema, key: str) -> Sequence[str]:
    """Return the strings in the list under a keyword. Empty if there is no list."""
    return [value for value in list_in(schema, key) if isinstance(value, str)]


def types_in(schema: Schema) -> Sequence[str]:
    """Return the type names under `type`, which is a string or a list. Empty if there are none."""
    given = schema.get("type")
    return [given] if isinstance(given, str) else texts_in(schema, "type")


def named_in(schema: Schema, key: str) -> Schema:
    """Return the members of the object under a keyword. Empty if there is no object."""
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def is_list(value: Json) -> TypeGuard[Sequence[Json]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_schema(value: Json) -> bool:
    return isinstance(value, bool | Mapping)


def _is_number(value: Json) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and not (isinstance(value, float) and not math.isfinite(value))


def _is_count(value: Json) -> bool:
    return isinstance(value, int | float) and _is_number(value) and value >= 0 and value == value // 1


def _is_types(value: Json) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, Sequence) and all(name in TYPES for name in names)


def _is_list_of(fits: Callable[[Json], bool]) -> Callable[[Json], bool]:
    return lambda value: is_list(value) and all(map(fits, value))


def _is_schemas_by_name(value: Json) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


_COUNT = ("a whole number of at least 0", _is_count)
_NUMBER = ("a number", _is_number)
_SCHEMA = ("a schema", _is_schema)
_SCHEMAS = ("a list of schemas", _is_list_of(_is_schema))
_NAMED = ("an object whose members are schemas", _is_schemas_by_name)
_TEXT = ("a string", lambda value: isinstance(value, str))
_BOUND = ("a number", lambda value: _is_number(value) or isinstance(value, bool))  # draft 4 has a boolean here

_VALUES: Mapping[str, tuple[str, Callable[[Json], bool]]] = {
    "type": (f"one or more of {', '.join(TYPES)}", _is_types),
    "enum": ("a list", is_list),
    "const": ("a value", lambda value: True),
    "required": ("a list of strings", _is_list_of(lambda value: isinstance(value, str))),
    "items": ("a schema, or a list of schemas", lambda value: _is_schema(value) or _SCHEMAS[1](value)),
    "multipleOf": ("a number that is not 0", lambda value: _is_number(value) and value != 0),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _BOUND),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(
        (
            "additionalItems",
            "additionalProperties",
            "unevaluatedItems",
            "unevaluatedProperties",
            "propertyNames",
        ),
        _SCHEMA,
    ),
    **dict.fromkeys(("prefixItems", "allOf", "anyOf", "oneOf"), _SCHEMAS),
    **dict.fromkeys(("properties", "patternProperties"), _NAMED),
    **dict.fromkeys(("pattern", "format", "$ref"), _TEXT),
}


def _never(schema: Schema) -> bool:
    return False


# Keywords that are refused, because they cannot be enforced. Each function returns whether the keyword has no effect in
# a schema, and can be ignored.
_REFUSED: Mapping[str, Callable[[Schema], bool]] = {
    "not": lambda schema: schema["not"] is False,
    "uniqueItems": lambda schema: not schema["uniqueItems"] or schema.get("maxItems") in (0, 1),
    "contains": _never,
    "if": lambda schema: not {"then", "else"} & schema.keys(),
    "dependentRequired": lambda schema: not schema["dependentRequired"],
    "dependentSchemas": lambda schema: not schema["dependentSchemas"],
    "dependencies": lambda schema: not schema["dependencies"],
    "$dynamicRef": _never,
    "$recursiveRef": _never,
}


@dataclass(frozen=True, slots=True)
class Use:
    """The context in which a schema is used.

    `shared` are the members that other parts of the same intersection also describe. `shares_items` tells whether other
    parts also describe the items.
    """

    is_closed: bool  # whether objects allow only the members that are described
    shared: frozenset[str] = frozenset()
    shares_items: bool = False

    def of_member(self, name: str) -> "Use":
        """Return how the schema of a member is used."""
        return PART if name in self.shared else VALUE

    @property
    def of_items(self) -> "Use":
        return PART if self.shares_items else VALUE

    @property
    def of_others(self) -> "Use":
        """Return how the schema of all unnamed members is used."""
        return VALUE if self.is_closed else PART


VALUE: Final = Use(is_closed=True)  # no other schema describes the value
PART: Final = Use(is_closed=False)

Rewrite: TypeAlias = Callable[[Json, str, Use], Json]  # arguments: a schema, its path, and its use
Refuse: TypeAlias = Callable[[str, str], None]  # a message and the path at fault; raises, or returns
