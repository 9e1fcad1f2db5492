"""The keys in the footer of the chat: the keys of the moment first, without those that do not fit."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from textual.binding import ActiveBinding, Binding

_LAST = ("f1", "f5", "f7", "f2", "f3", "ctrl+g")  # keys that apply everywhere, the most useful first


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
