"""List the files of a repository on the Hub: names, sizes, and digests.

This replaces HfApi of huggingface_hub, which reads responses of any length, ignores the wait that a busy Hub requests,
and takes 0.3 s to import.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from app.errors import AppError
from app.models import hub
from app.models.catalog import HubSource
from app.models.hub_cache import DIGEST, MAX_FILES, ListedFile
from app.models.repository import FILE
from app.progress import Progress
from app.settings.settings import Settings
from quant.bounded_json import JSONProblem, parse_object

MAX_BYTES = 16 << 20
MAX_NAME = 400  # characters; operating systems limit paths to a few hundred or a few thousand
_REVISION = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit."""

    revision: str
    license: str  # empty: not stated
    files: dict[str, ListedFile]


def list_repository(repo: str, settings: Settings, progress: Progress) -> Listing:
    """Return the files of the main branch. Raises Offline if the Hub cannot be reached, AppError if it refuses."""
    raw = hub.get(f"/api/models/{repo}/revision/main?blobs=true", repo, MAX_BYTES, settings, progress)
    try:
        answer = parse_object(raw)
    except JSONProblem as problem:
        raise AppError(f"the Hub's list of the files of {repo} is invalid: {problem}") from None
    revision, siblings = answer.get("sha"), answer.get("siblings")
    if not isinstance(revision, str) or not _REVISION.fullmatch(revision) or not isinstance(siblings, list):
        raise AppError(f"the Hub's list of the files of {repo} is invalid")
    files = {file.source.file: file for file in _files(siblings[:MAX_FILES], repo, revision)}
    return Listing(revision, _license(answer), files)


def _files(siblings: list[object], repo: str, revision: str) -> Iterator[ListedFile]:
    """Yield the files. Large ones are listed with their sha256, others with git's id of their content."""
    for entry in siblings:
        match entry:
            case {"rfilename": str(name), "lfs": {"sha256": str(digest), "size": int(size)}}:
                pass
            case {"rfilename": str(name), "blobId": str(digest), "size": int(size)}:
                pass
            case _:
                continue
        if len(name) <= MAX_NAME and FILE.fullmatch(name) and DIGEST.fullmatch(digest) and size > 0:
            yield ListedFile(HubSource(repo, revision, name), size, digest)


def _license(answer: dict[str, object]) -> str:
    match answer:
        case {"cardData": {"license": str(name)}} if name.isprintable():
            return name[:80]
    return ""
