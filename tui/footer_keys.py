"""How keys are written, and the keys in the footer: those of the moment first, without those that do not fit."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from textual.binding import ActiveBinding, Binding
from textual.keys import format_key

_LAST = ("f1", "f5", "f6", "f7", "f2", "f3", "ctrl+g")  # keys that apply everywhere, the most useful first


def key_name(key: str) -> str:
    """Return how the chat writes a key of a binding: "^a" for "ctrl+a", "F1", "esc"."""
    *modifiers, last = key.split("+")
    name = last.upper() if last[1:].isdigit() else format_key(last)
    return "".join("^" if one == "ctrl" else f"{one}+" for one in modifiers) + name


def key_names(keys: str) -> str:
    """Return how the chat writes several keys. Commas separate alternatives, and spaces separate consecutive keys."""
    return ", ".join(" ".join(map(key_name, one.split(" "))) for one in keys.split(", "))


def arrange(
    found: Mapping[str, ActiveBinding], moment: Mapping[str, str], width: int, label: Callable[[Binding], str]
) -> dict[str, ActiveBinding]:
    """Return the bindings in the order of the footer, and hide those that do not fit into `width` cells.

    `moment`: descriptions by key of what the user can do now. `label` returns how a key is shown.
    """
    now = {key: _shown_as(found[key], words) for key, words in moment.items() if key in found}
    rest = {key: one for key, one in found.items() if key not in (*now, *_LAST)}
    ordered = now | rest | {key: found[key] for key in _LAST if key in found and key not in now}
    seen: set[str] = set()
    for key, one in ordered.items():
        if one.binding.show and one.binding.action not in seen:  # the footer shows an action once
            seen.add(one.binding.action)
            width -= len(label(one.binding)) + len(one.binding.description) + 3
        if width < 0:
            ordered[key] = one._replace(binding=replace(one.binding, show=False))
    return ordered


def _shown_as(one: ActiveBinding, words: str) -> ActiveBinding:
    return one._replace(binding=replace(one.binding, description=words, show=True))
