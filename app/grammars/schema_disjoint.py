"""Checks whether a value can match two schemas. If not, `oneOf` is the same as `anyOf`, which can be enforced."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeAlias

from app.grammars.frames import GrammarProblem
from app.grammars.schema_keywords import Json, named_in, number_in, texts_in, types_in
from app.grammars.schema_tree import conjuncts, definition_of, mapped

_MAX_PAIRS = 2000
_MAX_DEPTH = 8
_ALL = frozenset(("null", "boolean", "number", "string", "array", "object"))
_TYPES: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}

_Disjoint: TypeAlias = Callable[[Json, Json], bool]


class Disjointness:
    """Finds out which rewritten schemas have no value in common."""

    def __init__(self, definitions: dict[str, Json]) -> None:
        self._definitions = definitions

    def resolve(self, root: Json, paths: Mapping[int, str], *, lenient: bool) -> Json:
        """Replace each `oneOf` with `anyOf`, in the root and in the definitions.

        `paths` maps the identity of each oneOf's list to its path. Raises GrammarProblem if the schemas of a oneOf
        overlap, unless `lenient` is set.
        """
        if not paths:
            return root

        def change(schema: Json) -> Json:
            if isinstance(schema, Mapping) and "oneOf" in schema:
                branches: Sequence[Json] = schema["oneOf"]  # type: ignore[assignment]
                if not lenient and not self._are_disjoint(branches):
                    raise GrammarProblem(
                        "A value may match several of its schemas. Use anyOf, or give each "
                        "schema a member with a different constant.",
                        paths.get(id(branches), ""),
                    )
                schema = {("anyOf" if key == "oneOf" else key): value for key, value in schema.items()}
            return mapped(schema, change)

        for name, body in self._definitions.items():
            self._definitions[name] = change(body)
        return change(root)

    def _are_disjoint(self, branches: Sequence[Json]) -> bool:
        count = len(branches)
        if count * (count - 1) // 2 > _MAX_PAIRS:
            return self._have_discriminator(branches)
        return all(self._disjoint(*pair, _MAX_DEPTH) for pair in combinations(branches, 2))

    def _have_discriminator(self, branches: Sequence[Json]) -> bool:
        """Whether a required member has a different constant in each branch."""
        seen = [self._facts(branch) for branch in branches]
        names = set[str].intersection(*(facts.required for facts in seen)) if seen else set()
        for name in names:
            values = [value for facts in seen for value in self._member_values(facts, name)]
            if len(values) == len(set(values)) and all(self._member_values(facts, name) for facts in seen):
                return True
        return False

    def _member_values(self, facts: "_Facts", name: str) -> Sequence[str]:
        for schema in facts.members.get(name, ()):
            if values := self._facts(schema).values:
                return sorted(values)
        return ()

    def _disjoint(self, one: Json, other: Json, depth: int) -> bool:
        if not depth:
            return False
        for first, second in ((one, other), (other, one)):
            branches = self._branches(first)
            if branches is not None:
                return all(self._disjoint(branch, second, depth - 1) for branch in branches)
        return self._facts(one).excludes(self._facts(other), lambda a, b: self._disjoint(a, b, depth - 1))

    def _branches(self, schema: Json) -> Sequence[Json] | None:
        """Return the branches of a schema that consists of one union."""
        seen = set[str]()
        while (name := definition_of(schema)) is not None and name not in seen:
            seen.add(name)
            schema = self._definitions[name]
        if isinstance(schema, Mapping) and len(schema) == 1:
            return schema.get("anyOf", schema.get("oneOf"))  # type: ignore[return-value]
        return None

    def _facts(self, schema: Json) -> "_Facts":
        facts = _Facts()
        for part in conjuncts(schema, self._definitions):
            if part is False:
                facts.types = frozenset()
            elif isinstance(part, Mapping):
                facts.add(part)
        return facts


@dataclass(slots=True)
class _Facts:
    """Known properties of the values that match a schema."""

    types: frozenset[str] = _ALL
    values: frozenset[str] | None = None  # the values as JSON; None: not enumerated
    low: float = -math.inf
    high: float = math.inf
    members: dict[str, list[Json]] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    allowed: frozenset[str] | None = None  # allowed names of members; None: any name

    def add(self, schema: Mapping[str, Json]) -> None:
        """Add the constraints of `schema`, which the values match as well."""
        if "type" in schema:
            self.types &= frozenset("number" if it == "integer" else it for it in types_in(schema))
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if listed is not None:
            found = frozenset(map(_canonical, listed))  # type: ignore[arg-type]
            self.values = found if self.values is None else self.values & found
        self.low = max(self.low, _number(schema, "minimum", -math.inf), _number(schema, "exclusiveMinimum", -math.inf))
        self.high = min(self.high, _number(schema, "maximum", math.inf), _number(schema, "exclusiveMaximum", math.inf))
        properties = named_in(schema, "properties")
        for name, part in properties.items():
            self.members.setdefault(name, []).append(part)
        self.required |= set(texts_in(schema, "required"))
        if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
            names_here = frozenset(properties)
            self.allowed = names_here if self.allowed is None else self.allowed & names_here

    def excludes(self, other: "_Facts", disjoint: "_Disjoint") -> bool:
        """Whether no value has both these properties and those of `other`."""
        types = self.types & other.types
        if self.values is not None and other.values is not None:
            return not self.values & other.values
        return all(self._excludes_type(kind, other, disjoint) for kind in types)

    def _excludes_type(self, kind: str, other: "_Facts", disjoint: "_Disjoint") -> bool:
        for one, two in ((self, other), (other, self)):
            if one.values is not None and not any(_type(json.loads(value)) == kind for value in one.values):
                return True
            if kind == "object" and two.allowed is not None and one.required - two.allowed:
                return True
        if kind == "number":
            return self.high < other.low or other.high < self.low
        if kind != "object":
            return False
        return any(
            disjoint(mine, theirs)
            for name in self.required | other.required
            for mine in self.members.get(name, ())
            for theirs in other.members.get(name, ())
        )


def _canonical(value: Json) -> str:
    """Return JSON text of a value that is the same for equal values."""

    def plain(part: Json) -> Json:
        if isinstance(part, float) and part.is_integer():
            return int(part)
        if isinstance(part, Mapping):
            return {key: plain(member) for key, member in part.items()}
        return [plain(member) for member in part] if isinstance(part, list) else part

    return json.dumps(plain(value), sort_keys=True)


def _type(value: Json) -> str:
    return _TYPES[type(value)]


def _number(schema: Mapping[str, Json], key: str, default: float) -> float:
    value = number_in(schema, key)
    return default if value is None else float(value)
