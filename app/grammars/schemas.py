"""Rewrites JSON schemas so that the grammar library enforces them fully, or refuses them by keyword and path.

    enforceable({"properties": {"a": {"type": "string"}}}, leaf_problem, lenient=False)
    -> {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}

- Keywords that constrain values and cannot be enforced raise GrammarProblem. In lenient schemas they are dropped.
- Objects are closed: a schema with `properties` or `required` allows no other members unless it mentions them, as in
  llama.cpp. This includes objects combined by `allOf`, `$ref`, `anyOf`, and `oneOf`, unless several `anyOf` or `oneOf`
  constrain the same object.
- `oneOf` becomes `anyOf` if no value matches two of its schemas, and is refused otherwise.
- Definitions are renamed. Those that no finite value matches become `false`.
"""

import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from app.grammars.frames import GrammarProblem
from app.grammars.schema_disjoint import Disjointness
from app.grammars.schema_keywords import (
    COMBINERS,
    ENFORCED,
    VALUE,
    Json,
    Schema,
    Use,
    list_in,
    mistake,
    named_in,
    texts_in,
    unenforced,
)
from app.grammars.schema_objects import ObjectRewriter
from app.grammars.schema_plain import LeafProblem, PlainRewriter
from app.grammars.schema_productive import without_infinite
from app.grammars.schema_references import Document, Pointer, path_of
from app.grammars.schema_tree import DEFINITION, reachable

_OBJECT_KEYS: Final = ("properties", "required", "patternProperties", "additionalProperties", "unevaluatedProperties")
_EXPLICIT: Final = frozenset(_OBJECT_KEYS[2:])  # keywords that define which other members are allowed
_SHOWN_CHARS: Final = 60
_ELSEWHERE: Final = "It cannot be enforced here. Use additionalProperties in each schema."

_Part: TypeAlias = tuple[Json, str]  # a schema and its path


def enforceable(schema: Json, leaf_problem: LeafProblem, *, lenient: bool) -> dict[str, Json]:
    """Return the schema in a form that the library enforces. `leaf_problem` compiles one string or number schema.

    Raises GrammarProblem for a keyword that cannot be enforced, and for a schema that no finite value matches.
    """
    rewriter = _Rewriter(Document(schema), leaf_problem, lenient=lenient)
    root = rewriter.rewrite_all(schema)
    root = Disjointness(rewriter.definitions).resolve(root, rewriter.unions, lenient=lenient)
    root, definitions = without_infinite(root, rewriter.definitions)
    if root is False:
        raise rewriter.emptiness()
    used = reachable(root, definitions)
    whole: dict[str, Json] = dict(root) if isinstance(root, Mapping) else {}
    defined: dict[str, Json] = {name: body for name, body in definitions.items() if name in used}
    return {**whole, "$defs": defined} if defined else whole


@dataclass(slots=True)
class _Survey:
    """The requirements that the parts of an intersection have for objects and arrays."""

    declared: Counter[str] = field(default_factory=Counter)  # number of parts that declare each member
    required: dict[str, None] = field(default_factory=dict)  # names of required members, in the order of the schema
    arrays: int = 0  # number of parts that describe items
    is_explicit: bool = False  # whether a part defines which other members are allowed
    has_unions: bool = False  # whether a part is a union of objects

    @property
    def names(self) -> dict[str, None]:
        return {**dict.fromkeys(self.declared), **self.required}

    @property
    def can_close(self) -> bool:
        return not self.is_explicit and not self.has_unions


class _Rewriter:
    """Rewrites one schema."""

    def __init__(self, document: Document, leaf_problem: LeafProblem, *, lenient: bool) -> None:
        self.definitions: dict[str, Json] = {}  # definitions by their new names
        self.unions: dict[int, str] = {}  # path of each oneOf, by the identity of its list
        self._document = document
        self._lenient = lenient
        self._names: dict[tuple[Pointer, Use], str] = {}
        self._pending: deque[tuple[str, Json, str, Use]] = deque()
        self._empty: list[GrammarProblem] = []  # problems of the parts that no value matches
        objects = ObjectRewriter(self.rewrite, self.refuse, self._resolved)
        self._plain = PlainRewriter(self.rewrite, self.refuse, self._empty.append, leaf_problem, objects)

    def rewrite_all(self, schema: Json) -> Json:
        """Return the rewritten root, and fill `definitions`."""
        root = self.rewrite(schema, "", VALUE)
        while self._pending:
            name, part, path, use = self._pending.popleft()
            self.definitions[name] = self.rewrite(part, path, use)
        return root

    def emptiness(self) -> GrammarProblem:
        """Return why no finite value matches the root."""
        if self._empty:
            return self._empty[0]
        return GrammarProblem(
            "No finite value matches it: it requires itself, or allows nothing. Make a member optional."
        )

    def refuse(self, message: str, path: str) -> None:
        """Raise GrammarProblem. If the schema is lenient, return instead, and the caller drops the keyword."""
        if not self._lenient:
            raise GrammarProblem(message, path)

    def rewrite(self, schema: Json, path: str, use: Use) -> Json:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            self.refuse("A schema must be an object, true, or false.", path)
            return True
        known = self._known(schema, path)
        if any(key in known for key in COMBINERS):
            return self._combined(known, path, use)
        return self._plain.rewrite(known, path, use)

    def _known(self, schema: Schema, path: str) -> dict[str, Json]:
        """Return the enforced keywords that have valid values."""
        left = dict(schema)
        while (keyword := unenforced(left)) is not None:
            message = f"The keyword {keyword} cannot be enforced. Remove it, and check the reply yourself."
            self.refuse(message, f"{path}.{keyword}")
            del left[keyword]
        known = {}
        for key, value in left.items():
            expected = mistake(key, value) if key in ENFORCED else ""
            if expected:
                self.refuse(f"{key} must be {expected}, not {_shown(value)}.", f"{path}.{key}")
            elif expected is None:
                known[key] = value
        return known

    # -- combined schemas

    def _combined(self, known: Schema, path: str, use: Use) -> Json:
        parts = self._conjuncts(known, path)
        unions = [(key, list_in(known, key)) for key in ("anyOf", "oneOf") if key in known]
        closes = self._closes_explicitly(known, path)
        if not use.is_closed and not closes:
            return self._intersection(parts, unions, path, use)
        if len(unions) == 1:
            return self._union(parts, unions[0], path, closes=closes)
        if len(parts) == 1 and not unions and not closes:
            return self._part(*parts[0], VALUE)
        survey = self._survey(part for part, _ in parts)
        if unions or not survey.can_close:
            if closes:
                self.refuse(_ELSEWHERE, f"{path}.unevaluatedProperties")
            return self._intersection(parts, unions, path, _part_use(survey))
        shut = [_closing(survey.names)] if survey.names or closes else []
        return self._intersection(parts, unions, path, _part_use(survey), shut)

    def _conjuncts(self, known: Schema, path: str) -> "list[_Part]":
        """Return the parts of an intersection in their written order, which decides the order of members."""
        own = {key: value for key, value in known.items() if key not in (*COMBINERS, "unevaluatedProperties")}
        if own.pop("unevaluatedItems", True) is not True:
            self.refuse(
                "It cannot be enforced in combination with other schemas. Use items.", f"{path}.unevaluatedItems"
            )
        parts: list[tuple[Json, str]] = []
        for key in known:
            if key == "$ref":
                parts.append(({"$ref": known[key]}, path))
            elif key == "allOf":
                members = enumerate(list_in(known, key))
                parts += [(member, f"{path}.allOf[{number}]") for number, member in members]
            elif key in own and not any(part is own for part, _ in parts):
                parts.append((own, path))
        return parts

    def _closes_explicitly(self, known: Schema, path: str) -> bool:
        """Whether a combined schema forbids members that none of its parts describe."""
        unevaluated = known.get("unevaluatedProperties", True)
        if unevaluated not in (True, False, {}):
            self.refuse("It cannot be enforced in combination with other schemas.", f"{path}.unevaluatedProperties")
        return unevaluated is False

    def _intersection(
        self,
        parts: Sequence[_Part],
        unions: Sequence[tuple[str, Sequence[Json]]],
        path: str,
        use: Use,
        more: Sequence[Json] = (),
    ) -> Json:
        members = [self._part(part, where, use) for part, where in parts]
        members += [self._alternatives(key, branches, path, use) for key, branches in unions]
        members += more
        return members[0] if len(members) == 1 else {"allOf": members}

    def _part(self, part: Json, path: str, use: Use) -> Json:
        if isinstance(part, Mapping) and part.keys() == {"$ref"}:
            return self._reference(str(part["$ref"]), path, use)
        return self.rewrite(part, path, use)

    def _alternatives(self, key: str, branches: Sequence[Json], path: str, use: Use) -> Json:
        numbered = enumerate(branches)
        return self._one_of(key, [self._part(it, f"{path}.{key}[{number}]", use) for number, it in numbered], path)

    def _one_of(self, key: str, branches: list[Json], path: str) -> Json:
        if key == "oneOf":
            self.unions[id(branches)] = f"{path}.oneOf"
        return {key: branches}

    def _union(self, parts: Sequence[_Part], union: tuple[str, Sequence[Json]], path: str, *, closes: bool) -> Json:
        """Return a union whose branches each include the other parts of the object."""
        key, branches = union
        survey = self._survey(part for part, _ in parts)
        if not survey.names and not closes:
            members = [self._part(part, where, _part_use(survey)) for part, where in parts]
            whole = self._alternatives(key, branches, path, VALUE)
            return {"allOf": [*members, whole]} if members else whole
        surveys = [self._survey([branch]) for branch in branches]
        if closes and not all(one.can_close for one in (survey, *surveys)):
            self.refuse(_ELSEWHERE, f"{path}.unevaluatedProperties")
        use = _part_use(survey, *surveys)
        if not survey.can_close:
            return self._intersection(parts, [union], path, use)
        common = [self._define(self._intersection(parts, [], path, use))] if parts else []
        closed: list[Json] = []
        for number, (branch, found) in enumerate(zip(branches, surveys, strict=True)):
            shut = [_closing({**survey.names, **found.names})] if found.can_close else []
            closed.append({"allOf": [*common, self._part(branch, f"{path}.{key}[{number}]", use), *shut]})
        return self._one_of(key, closed, path)

    def _survey(self, parts: Iterable[Json]) -> _Survey:
        survey, left, seen = _Survey(), [*parts], set[str]()
        while left:
            part = left.pop(0)
            if not isinstance(part, Mapping):
                continue
            survey.declared.update(list(named_in(part, "properties")))
            survey.required.update(dict.fromkeys(texts_in(part, "required")))
            survey.arrays += any(key in part for key in ("items", "prefixItems"))
            survey.is_explicit |= any(part.get(key) is not None for key in _EXPLICIT)
            left += list_in(part, "allOf")
            for key in ("anyOf", "oneOf"):
                survey.has_unions |= any(map(_describes_objects, list_in(part, key)))
            reference = part.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                left += self._found(reference)
        return survey

    def _found(self, reference: str) -> list[Json]:
        try:
            return [self._document.find(reference, "")[1]]
        except GrammarProblem:
            return []  # an invalid reference is refused later, when it is rewritten

    # -- definitions

    def _resolved(self, schema: Json) -> Json:
        """Return the schema after following references."""
        seen = set[str]()
        while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
            found = [] if reference in seen else self._found(reference)
            if not found:
                break
            seen.add(reference)
            schema = found[0]
        return schema

    def _reference(self, reference: str, path: str, use: Use) -> Json:
        try:
            pointer, part = self._document.find(reference, f"{path}.$ref")
        except GrammarProblem as problem:
            self.refuse(problem.message, problem.path)
            return True
        if (pointer, use) not in self._names:
            self._names[pointer, use] = name = self._new_name()
            self._pending.append((name, part, path_of(pointer), use))
        return {"$ref": DEFINITION + self._names[pointer, use]}

    def _define(self, body: Json) -> Json:
        """Rewrite a part as a definition, and return a reference to it."""
        name = self._new_name()
        self.definitions[name] = body
        return {"$ref": DEFINITION + name}

    def _new_name(self) -> str:
        name = f"d{len(self.definitions)}"
        self.definitions[name] = True
        return name


def _part_use(common: _Survey, *branches: _Survey) -> Use:
    """Return the use of each part of an intersection, which may be combined with one branch of a union.

    A member that two parts describe stays open in both.
    """
    counts, arrays = Counter(common.declared), common.arrays
    for name in {name for branch in branches for name in branch.declared}:
        counts[name] += max(branch.declared[name] for branch in branches)
    arrays += max((branch.arrays for branch in branches), default=0)
    shared = frozenset(name for name, count in counts.items() if count > 1)
    return Use(is_closed=False, shared=shared, shares_items=arrays > 1)


def _shown(value: Json) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _closing(names: Iterable[str]) -> Json:
    return {"properties": dict.fromkeys(names, True), "additionalProperties": False}


def _describes_objects(schema: Json) -> bool:
    return isinstance(schema, Mapping) and any(key in schema for key in (*_OBJECT_KEYS, *COMBINERS))
