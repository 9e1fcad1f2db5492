"""Finds schemas that no finite value matches, such as an object that requires itself or a circular reference.

It computes a fixpoint: a definition has a finite value if everything that it requires has one.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from app.grammars.schema_keywords import Json, Schema, list_in, named_in, number_in, texts_in, types_in
from app.grammars.schema_tree import conjuncts, definition_of, mapped

_MAX_ITEMS: Final = 1000  # maximum number of prefixItems that are checked


def without_infinite(root: Json, definitions: Mapping[str, Json]) -> tuple[Json, dict[str, Json]]:
    """Replace every part that no finite value matches with `false`, in the root and in the definitions."""
    search = _Search(definitions)

    def cut(schema: Json) -> Json:
        return mapped(schema, cut) if search.is_finite(schema) else False

    return cut(root), {name: cut(body) for name, body in definitions.items()}


class _Search:
    """Finds the definitions that have a finite value."""

    def __init__(self, definitions: Mapping[str, Json]) -> None:
        self._definitions = definitions
        self._finite: set[str] = set()
        left = dict(definitions)
        while found := {name for name, body in left.items() if self.is_finite(body)}:
            self._finite |= found
            left = {name: body for name, body in left.items() if name not in found}

    def is_finite(self, schema: Json) -> bool:
        """Whether the search knows that a finite value matches."""
        if not isinstance(schema, Mapping):
            return schema is not False
        name = definition_of(schema)
        if name is not None:
            return name in self._finite
        if "allOf" in schema:
            return all(map(self.is_finite, list_in(schema, "allOf"))) and self._is_finite_object(self._objects(schema))
        if "anyOf" in schema and not any(map(self.is_finite, list_in(schema, "anyOf"))):
            return False
        if "enum" in schema and not list_in(schema, "enum"):
            return False
        types = types_in(schema) if "type" in schema else ["null"]
        return any(self._is_finite_type(kind, schema) for kind in types)

    def _is_finite_type(self, kind: str, schema: Schema) -> bool:
        if kind == "object":
            return self._is_finite_object([schema])
        return kind != "array" or all(map(self.is_finite, _needed_items(schema)))

    def _is_finite_object(self, parts: Sequence[Schema]) -> bool:
        """Whether every required member of an object is finite in each of the parts."""
        required = {name for part in parts for name in texts_in(part, "required")}
        return all(self.is_finite(_member(part, name)) for name in required for part in parts)

    def _objects(self, schema: Schema) -> Sequence[Schema]:
        """Return the parts of an intersection that describes an object. Empty if it may describe another value."""
        parts = [
            part
            for part in conjuncts(schema, self._definitions)
            if isinstance(part, Mapping) and part.keys() & {"properties", "required", "additionalProperties"}
        ]
        return parts if any(part.get("type") == "object" for part in parts) else ()


def _needed_items(schema: Schema) -> Sequence[Json]:
    """Return the schemas of the items in the shortest array."""
    least = int(number_in(schema, "minItems") or 0)
    first = list_in(schema, "prefixItems")
    return [*first[: min(least, _MAX_ITEMS)], *([schema.get("items", True)] if least > len(first) else ())]


def _member(schema: Schema, name: str) -> Json:
    """Return the schema of an object's member."""
    properties = named_in(schema, "properties")
    if name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)
