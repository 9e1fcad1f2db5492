"""Rewrites schemas without references and combinations: the type, the constants, and the keywords of the type."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, TypeAlias

from app.grammars.frames import GrammarProblem
from app.grammars.schema_keywords import (
    FORMATS,
    TYPE_OF,
    TYPES,
    UNENFORCED_FORMATS,
    Json,
    Refuse,
    Rewrite,
    Schema,
    Use,
    is_list,
    list_in,
    number_in,
    types_in,
)
from app.grammars.schema_numbers import integer_bounds, is_exact, multiple, number_bounds
from app.grammars.schema_objects import ObjectRewriter

# Compiles the schema of a string or a number. Returns "empty" if no value matches, "invalid" with a message, or None.
LeafProblem: TypeAlias = Callable[[Schema], "tuple[Literal['empty', 'invalid'], str] | None"]

_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ALL: Final = frozenset(TYPES) - {"integer"}
_WITH_KEYWORDS: Final = ("integer", "number", "string", "array", "object")


class PlainRewriter:
    """Rewrites schemas that have neither references nor combinations.

    `refuse` raises, or returns to ignore the keyword. `note_empty` records a part that no value matches.
    """

    def __init__(
        self,
        rewrite: Rewrite,
        refuse: Refuse,
        note_empty: Callable[[GrammarProblem], None],
        leaf_problem: LeafProblem,
        objects: ObjectRewriter,
    ) -> None:
        self._rewrite = rewrite
        self._refuse = refuse
        self._note_empty = note_empty
        self._leaf_problem = leaf_problem
        self._objects = objects

    def rewrite(self, known: Schema, path: str, use: Use) -> Json:
        """Rewrite a schema. `known` has only enforced keywords with values of the right kind."""
        types = _types(known, implied=use.is_closed)
        written: dict[str, Json] = {key: self._constants(known, key, path) for key in ("enum", "const") if key in known}
        if "enum" in written and not list_in(written, "enum"):
            self._note_empty(GrammarProblem("It lists no values, so no value matches.", f"{path}.enum"))
        for kind in filter(types.__contains__, _WITH_KEYWORDS):
            found = self._of_type(kind, known, path, use)
            if found is None:
                types -= {kind}
            else:
                written |= found
        if not types:
            return False
        return written if types == _ALL else {"type": _named(types), **written}

    def _of_type(self, kind: str, known: Schema, path: str, use: Use) -> dict[str, Json] | None:
        """Return the rewritten keywords of one type, or None if no value of the type matches."""
        match kind:
            case "integer" | "number":
                return self._number(known, path, kind)
            case "string":
                return self._string(known, path)
            case "array":
                return self._array(known, path, use)
        return self._objects.rewrite(known, path, use)

    def _constants(self, known: Schema, key: str, path: str) -> Json:
        inexact = next(_inexact(known[key]), None)
        if inexact is not None:
            self._refuse(f"{inexact} is beyond 2**53 and would be rounded. Use a string.", f"{path}.{key}")
        return known[key]

    def _number(self, known: Schema, path: str, kind: str) -> dict[str, Json] | None:
        written: dict[str, Json] = {}
        if any(key in known for key in _BOUNDS):
            try:
                written |= integer_bounds(known) if kind == "integer" else number_bounds(known)
            except GrammarProblem as problem:
                self._note_empty(GrammarProblem(problem.message, path))
                return None
        step = number_in(known, "multipleOf")
        if step is None:
            return written
        try:
            written["multipleOf"] = multiple(step)
        except GrammarProblem as problem:
            self._refuse(problem.message, f"{path}.multipleOf")
            return written
        return self._checked(kind, written, path, "multipleOf")

    def _string(self, known: Schema, path: str) -> dict[str, Json] | None:
        written = counts(known, "minLength", "maxLength")
        name = known.get("format")
        if name in UNENFORCED_FORMATS:
            self._refuse(f"The format {name} cannot be enforced. Remove it, or use a pattern.", f"{path}.format")
        elif name in FORMATS:
            written["format"] = name
        if "pattern" in known:
            written["pattern"] = known["pattern"]
        blamed = next((key for key in ("pattern", "format", "maxLength") if key in written), None)
        return written if blamed is None else self._checked("string", written, path, blamed)

    def _checked(self, kind: str, keywords: dict[str, Json], path: str, blamed: str) -> dict[str, Json] | None:
        problem = self._leaf_problem({"type": kind, **keywords})
        if problem is None:
            return keywords
        what, message = problem
        if what == "empty":
            self._note_empty(GrammarProblem(f"No {kind} matches it.", f"{path}.{blamed}"))
            return None
        self._refuse(message, f"{path}.{blamed}")
        return {key: value for key, value in keywords.items() if key != blamed}

    def _array(self, known: Schema, path: str, use: Use) -> dict[str, Json]:
        written = counts(known, "minItems", "maxItems")
        first, rest = ("items", "additionalItems") if is_list(known.get("items")) else ("prefixItems", "items")
        rest = rest if rest in known else "unevaluatedItems"
        if first_items := list_in(known, first):
            written["prefixItems"] = [
                self._rewrite(item, f"{path}.{first}[{number}]", use.of_items)
                for number, item in enumerate(first_items)
            ]
        if rest in known:
            written["items"] = self._rewrite(known[rest], f"{path}.{rest}", use.of_items)
        return written


def counts(known: Schema, *keys: str) -> dict[str, Json]:
    """Return the integers among the values of the keywords."""
    found = ((key, number_in(known, key)) for key in keys)
    return {key: int(value) for key, value in found if value is not None}


def _types(known: Schema, *, implied: bool) -> frozenset[str]:
    """Return the types that a schema allows.

    Without `type`, keywords that apply to one type only imply that type.
    """
    if "type" not in known:
        kinds = {TYPE_OF[key] for key in known if key in TYPE_OF}
        is_one = implied and len(kinds) == 1 and not known.keys() & {"enum", "const"}
        return frozenset(kinds) if is_one else _ALL
    types = frozenset(types_in(known))
    return types - {"integer"} if "number" in types else types


def _named(types: frozenset[str]) -> Json:
    names: list[Json] = [name for name in TYPES if name in types]
    return names[0] if len(names) == 1 else names


def _inexact(value: Json) -> Iterator[int | float]:
    """Yield the numbers in a constant that the library would round."""
    if isinstance(value, int | float) and not is_exact(value):
        yield value
    if isinstance(value, Mapping):
        value = list(value.values())
    if is_list(value):
        for member in value:
            yield from _inexact(member)
