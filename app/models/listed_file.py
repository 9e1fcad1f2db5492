"""A file of a repository of the Hub, and what its bytes must be: the noun."""

from dataclasses import dataclass

from app.models.catalog import HubSource


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of a repository at one commit. `digest` in hex: sha256, or git's sha1 of a blob."""

    source: HubSource
    size: int
    digest: str

    @property
    def is_sha256(self) -> bool:
        return len(self.digest) == 64
