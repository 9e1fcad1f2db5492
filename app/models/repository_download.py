"""Download a model from a Hub repository. Files that are not part of the model are not downloaded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from app.errors import IntegrityError
from app.models import hub
from app.models.hub_cache import ListedFile
from app.models.hub_listing import Listing, list_repository
from app.models.hub_models import HubModels
from app.models.machine_memory import is_likely_to_fit, machine_memory
from app.models.reachability import check_reachable
from app.models.repository import RepositoryName, choose
from app.models.transfer.incoming import Incoming, check_space
from app.models.transfer.transfer import download_files
from app.progress import Progress, format_bytes
from app.settings.settings import Settings
from quant.safetensors_shards import INDEX, read_index


def download_repository(name: RepositoryName, models: HubModels, settings: Settings, progress: Progress) -> None:
    """Download the missing files of the model, and record it. The caller must hold its lock.

    Files and parts that have arrived are kept, so that an interrupted download resumes. Raises Offline, NoSpace,
    IntegrityError, ModelNotFound, ModelFileError, or AppError if the Hub refuses.
    """
    with progress.task(f"Listing the files of {name.repo} on {hub.host(settings)}", None):
        check_reachable(settings.hub_endpoint)
        listing = list_repository(name.repo, settings, progress)
    model = choose(name, listing.files)
    name = RepositoryName(name.repo, model.quantization or None)
    files = [listing.files[file] for file in model.files]
    described = [file for file in files if file.source.file.endswith((".json", ".jinja"))]
    _fetch(described, models, settings, progress)
    if index := next((file for file in described if file.source.file == INDEX), None):
        files += _shards(listing, models.path(index))
    licensed = f", {listing.license}" if listing.license else ""
    size = sum(file.size for file in files)
    progress.say(f"Downloading {name} ({format_bytes(size)}{licensed}).")
    if not is_likely_to_fit(size, memory := machine_memory(settings)):
        progress.say(f"It may not fit in the {format_bytes(memory)} of free memory. Check with: ingle fit {name}")
    models.record_pull(name, files, listing.license)
    _fetch(files, models, settings, progress)
    models.complete(name, listing.revision)


def _shards(listing: Listing, index: Path) -> list[ListedFile]:
    names = sorted(read_index(index))
    if missing := [name for name in names if name not in listing.files]:
        raise IntegrityError(f"{index} names {missing[0]}, which the repository does not have")
    return [listing.files[name] for name in names]


def _fetch(files: Sequence[ListedFile], models: HubModels, settings: Settings, progress: Progress) -> None:
    """Download the missing files, if the disk has space for all of them."""
    missing = [file for file in files if not models.has(file, progress)]
    if not missing:
        return
    check_space(settings.hub_cache, sum(models.missing(file) for file in missing))
    what = missing[0].source.file if len(missing) == 1 else f"{len(missing)} files"
    wanted = [hub.web_file(file.source, file.digest, partial(_receiving, file, models), settings) for file in missing]
    size = sum(file.size for file in missing)
    download_files(wanted, f"Downloading {what} from {hub.host(settings)}", size, progress)


@contextmanager
def _receiving(file: ListedFile, models: HubModels) -> Iterator[Incoming]:
    try:
        with models.receiving(file) as incoming:
            yield incoming
    except IntegrityError as problem:
        raise IntegrityError(f"{file.source.file}: {problem.message}", "Pull the model again.") from None
    models.remember_digest(file)
