"""How long a reply may take, for editors that would not show it later. Plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """In seconds; None: any number. A reply that has run out of time ends where it is, as at the most tokens."""

    reading: float | None = None  # of the prompt, from when the engine begins with it
    writing: float | None = None  # from the first token on, once there is a line break

    @classmethod
    def of_milliseconds(cls, reading: int | None, writing: int | None) -> "TimeLimits":
        """Return the limits of a request, in which 0 stands for any number, as in llama.cpp's API."""
        return cls(reading / 1000 if reading else None, writing / 1000 if writing else None)


NO_LIMITS = TimeLimits()
