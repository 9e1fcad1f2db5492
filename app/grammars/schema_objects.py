"""Rewrites the keywords of objects: named members, all other members, and limits on names and number of members."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.grammars.schema_keywords import (
    ENFORCED,
    Json,
    Refuse,
    Rewrite,
    Schema,
    Use,
    list_in,
    named_in,
    number_in,
    texts_in,
)

_COUNTED = "It can only be enforced if all members are required. Remove it, or require them."
_NAMES = "It can only be enforced if it lists the names, or is a pattern for all of them. Use patternProperties."


@dataclass(slots=True)
class _Members:
    """The members that an object may have.

    `others` is the schema of members that neither `named` nor `by_pattern` covers; None: not specified.
    """

    named: dict[str, Json]
    by_pattern: dict[str, Json]
    others: Json = None

    @property
    def is_shut(self) -> bool:
        """Whether the object can have no members except those in `named`."""
        return self.others is False and not self.by_pattern


class ObjectRewriter:
    """Rewrites the keywords of objects.

    `resolve` follows references. `refuse` raises, or returns to ignore the keyword.
    """

    def __init__(self, rewrite: Rewrite, refuse: Refuse, resolve: Callable[[Json], Json]) -> None:
        self._rewrite = rewrite
        self._refuse = refuse
        self._resolve = resolve

    def rewrite(self, known: Schema, path: str, use: Use) -> dict[str, Json]:
        """Return the rewritten form of the object keywords in `known`."""
        required = list(dict.fromkeys(texts_in(known, "required")))
        members = _Members(
            self._parts(known, "properties", path, use),
            self._parts(known, "patternProperties", path, use),
            self._others(known, path, use),
        )
        if "propertyNames" in known:
            self._name(known, members, path)
        if use.is_closed and members.others is None and not members.by_pattern:
            _close(known, members, required)
        counts = {key: value for key in _COUNTS if (value := number_in(known, key)) is not None}
        if use.is_closed:
            counts = self._counted(counts, members, required, path)
        return _written(members, required, counts)

    def _parts(self, known: Schema, key: str, path: str, use: Use) -> dict[str, Json]:
        parts = named_in(known, key).items()
        return {name: self._rewrite(part, f"{path}.{key}.{name}", use.of_member(name)) for name, part in parts}

    def _others(self, known: Schema, path: str, use: Use) -> Json:
        for key in ("additionalProperties", "unevaluatedProperties"):
            if key in known:
                return self._rewrite(known[key], f"{path}.{key}", use.of_others)
        return None

    def _name(self, known: Schema, members: _Members, path: str) -> None:
        """Restrict the names of members as `propertyNames` requires."""
        names = self._resolve(known["propertyNames"])
        any_value = True if members.others is None else members.others
        rules = {key: value for key, value in names.items() if key in ENFORCED} if isinstance(names, Mapping) else {}
        if rules.get("type", "string") == "string":
            rules.pop("type", None)
        listed = [rules["const"]] if "const" in rules else list_in(rules, "enum")
        if names is False:
            members.named, members.by_pattern, members.others = {}, {}, False
        elif listed and not members.by_pattern:
            members.named = {name: members.named.get(name, any_value) for name in listed if isinstance(name, str)}
            members.others = False
        elif rules.keys() == {"pattern"} and not members.by_pattern and not members.named:
            members.by_pattern, members.others = {str(rules["pattern"]): any_value}, False
        elif rules:
            self._refuse(_NAMES, f"{path}.propertyNames")

    def _counted(self, counts: dict[str, float], members: _Members, required: list[str], path: str) -> dict[str, float]:
        """Return the bounds on the number of members, except for bounds that the other keywords imply.

        The library enforces only some of these bounds. The others are refused.
        """
        least, most = (counts.get(key) for key in _COUNTS)
        optional = [name for name in members.named if name not in required]
        if least is not None and least <= len(required):
            least = None
        if most is not None and most == len(required):
            members.named |= dict.fromkeys(optional, False)
            members.by_pattern, members.others, optional, most = {}, False, [], None
        if most is not None and members.is_shut and most >= len(members.named):
            most = None
        counts = {key: value for key, value in zip(_COUNTS, (least, most), strict=True) if value is not None}
        at_most_one = (least or 0) <= len(required) + 1 and most in (None, len(required) + 1)
        if counts and optional and not (members.is_shut and at_most_one):
            for key in counts:
                self._refuse(_COUNTED, f"{path}.{key}")
            return {}
        return counts


_COUNTS = ("minProperties", "maxProperties")


def _close(known: Schema, members: _Members, required: list[str]) -> None:
    """Allow only the members that are described, if any are. Schemas with constants need no such limit."""
    described = "properties" in known or required
    if described and not known.keys() & {"enum", "const"}:
        members.named |= {name: True for name in required if name not in members.named}
        members.others = False


def _written(members: _Members, required: list[str], counts: dict[str, float]) -> dict[str, Json]:
    written: dict[str, Json] = {}
    if members.named:
        written["properties"] = members.named
    if members.by_pattern:
        written["patternProperties"] = members.by_pattern
    if members.others is not None:
        written["additionalProperties"] = members.others
    if required:
        written["required"] = required
    return {**written, **{key: int(value) for key, value in counts.items()}}
