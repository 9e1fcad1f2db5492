"""Where the tokens of a prompt came from: a tier of the KV cache, or computation.

One type for the scheduler, the counters, replies, and the chat; the tiers are called device, host (RAM), and disk.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenSources:
    """Token counts of one prompt, or of several added up."""

    device: int = 0  # found in the KV cache of the device
    host: int = 0  # found in the host pool, in RAM
    disk: int = 0  # found in files
    computed: int = 0
    restore_seconds: float = 0.0  # time to copy blocks from the host pool and to read them from files
    skipped: int = 0  # of the computed ones, those in files: computing them was faster than reading

    @property
    def cached(self) -> int:
        """Tokens that did not have to be computed."""
        return self.device + self.host + self.disk

    def __add__(self, other: "TokenSources") -> "TokenSources":
        return TokenSources(
            self.device + other.device,
            self.host + other.host,
            self.disk + other.disk,
            self.computed + other.computed,
            self.restore_seconds + other.restore_seconds,
            self.skipped + other.skipped,
        )


NONE = TokenSources()
