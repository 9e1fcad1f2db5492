"""Sampling of requests that leave it open: the one place where a request is merged with what its model recommends.

Dialects hand over only the fields that a request gave. Nothing here knows a wire format or where a model's files are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_NOTHING: Mapping[str, float] = {}
# A penalty looks at the whole prompt. For code insertion that is the file around the gap, whose names the missing part
# has to repeat.
_NOT_FOR_INSERTION = ("repetition_penalty",)
VARIED_TEMPERATURE: Final = 0.7  # of several replies to one prompt by a model for which 0 is recommended


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """The default value of each sampling field."""

    recommended: Mapping[str, float] | None = None  # by names of SamplingParams; None: each API has its own defaults

    def fill(
        self,
        given: Mapping[str, Any],
        api: Mapping[str, float] = _NOTHING,
        *,
        inserts: bool = False,
        several: bool = False,
    ) -> dict[str, Any]:
        """Return `given`, fields of SamplingParams, with the defaults of all fields that it lacks.

        `api` holds the defaults of the request's own API. They apply if the model's recommendation is turned off.
        `inserts` says that the reply fills a gap in code, `several` that more than one reply to the prompt is wanted,
        all of which would be the same at temperature 0.
        """
        if self.recommended is None:
            return {**api, **given}
        defaults = {**self.recommended}
        if inserts:
            defaults = {name: value for name, value in defaults.items() if name not in _NOT_FOR_INSERTION}
        if several and defaults.get("temperature") == 0:
            defaults["temperature"] = VARIED_TEMPERATURE
        return {**defaults, **given}


API_DEFAULTS = DefaultSampling()
