"""Resolves references within a schema. Other documents are never fetched."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import unquote

from app.grammars.frames import GrammarProblem
from app.grammars.schema_keywords import Json, is_list

Pointer = tuple[str, ...]  # keys that lead from the root to a part


class Document:
    """A schema whose parts refer to each other."""

    def __init__(self, root: Json) -> None:
        self._root = root

    def find(self, reference: str, path: str) -> tuple[Pointer, Json]:
        """Return the part that the reference at `path` points to. Raises GrammarProblem."""
        base, _, fragment = reference.partition("#")
        if base and base.rstrip("#") != self._id:
            raise GrammarProblem(
                f"{reference!r} refers to another document, which is not fetched. Put the definition into $defs.", path
            )
        if fragment and not fragment.startswith("/"):
            if fragment not in self._anchors:
                raise GrammarProblem(f"{reference!r} is not defined.", path)
            return self._anchors[fragment]
        pointer = tuple(_unescaped(step) for step in fragment.split("/")[1:]) if fragment.strip("/") else ()
        part = self._root
        for step in pointer:
            found = _member(part, step)
            if found is None:
                raise GrammarProblem(f"{reference!r} is not defined.", path)
            part = found[0]
        return pointer, part

    @functools.cached_property
    def _id(self) -> str:
        identity = self._root.get("$id") if isinstance(self._root, Mapping) else None
        return identity.rstrip("#") if isinstance(identity, str) else ""

    @functools.cached_property
    def _anchors(self) -> Mapping[str, tuple[Pointer, Json]]:
        found: dict[str, tuple[Pointer, Json]] = {}
        for pointer, part in _parts((), self._root):
            for key in ("$anchor", "$dynamicAnchor", "$id", "id"):
                name = part.get(key)
                if isinstance(name, str) and (key.endswith("nchor") or name.startswith("#")):
                    found.setdefault(name.removeprefix("#"), (pointer, part))
        return found


def path_of(pointer: Pointer) -> str:
    """Return a pointer in the form that errors use for paths."""
    return "".join(f"[{step}]" if step.isdigit() else f".{step}" for step in pointer)


def _unescaped(step: str) -> str:
    return unquote(step).replace("~1", "/").replace("~0", "~")


def _member(part: Json, step: str) -> tuple[Json] | None:
    if isinstance(part, Mapping):
        return (part[step],) if step in part else None
    if is_list(part) and step.isdigit() and int(step) < len(part):
        return (part[int(step)],)
    return None


def _parts(pointer: Pointer, part: Json) -> Iterator[tuple[Pointer, Mapping[str, Json]]]:
    """Yield every JSON object within a schema."""
    members: Iterable[tuple[str, Json]] = ()
    if isinstance(part, Mapping):
        yield pointer, part
        members = part.items()
    elif is_list(part):
        members = ((str(number), member) for number, member in enumerate(part))
    for step, member in members:
        yield from _parts((*pointer, step), member)
