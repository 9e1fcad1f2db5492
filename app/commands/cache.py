"""`ingle cache`: list, clear, and verify the on-disk KV cache."""

import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from app.commands.output import as_json, echo_table
from app.errors import EXIT_FAILURE, AppError, ModelNotFound
from app.generation.reply_token_file import FILE_NAME
from app.models.catalog import load_catalog
from app.progress import format_bytes, progress_on_stderr
from app.settings.settings import load_settings
from app.text.terminal_text import sanitize
from engine.kv.disk.folder import (
    CachedModel,
    ClearResult,
    cached_models,
    clear,
    delete,
    find_cached_models,
    find_damage,
    resolve_limit,
    segment_files,
)

EXAMPLES = """\b
Examples:
  ingle cache ls
  ingle cache clear smollm2:135m
  ingle cache verify --delete
"""
LS_EXAMPLES = """\b
Examples:
  ingle cache ls
  ingle cache ls --json | jq .size
"""
CLEAR_EXAMPLES = """\b
Examples:
  ingle cache clear                 everything, after a question
  ingle cache clear --yes           everything, for scripts
  ingle cache clear smollm2:135m    the cache of one model
  ingle cache clear 3f9a21c0        the entry with this ID in ingle cache ls
"""
VERIFY_EXAMPLES = """\b
Examples:
  ingle cache verify
  ingle cache verify --delete
"""

_ID_DIGITS = 8


@click.group(epilog=EXAMPLES)
def cache() -> None:
    """Show or clear the on-disk KV cache, from which conversations resume fast after a restart.

    The cache is as private as your conversations: it is computed from them, and its files are readable to you alone.
    The setting kv_disk_gb limits its size in GB (0 disables it), and kv_disk_dir is its folder.
    """


@cache.command(epilog=LS_EXAMPLES)
@click.option("--json", "as_object", is_flag=True, help="Print a JSON object.")
def ls(as_object: bool) -> None:
    """List the caches of all models, and their common size limit."""
    settings = load_settings()
    folder, models = settings.kv_disk_dir, cached_models(settings.kv_disk_dir)
    size = sum(model.size for model in models)
    limit = resolve_limit(folder, settings.kv_disk_limit, size)
    if as_object:
        click.echo(as_json({"folder": folder, "size": size, "limit": limit, "models": list(map(_as_data, models))}))
        return
    if models:
        echo_table([("ID", "MODEL", "BACKEND", "KV TYPE", "TOKENS", "SIZE", "LAST USED"), *map(_row, models)])
        click.echo()
    off = f"and the cache is disabled ({settings.origins['kv_disk_gb']})"
    click.echo(f"{format_bytes(size)} {f'of at most {format_bytes(limit)}' if limit else off} in {folder}")


@cache.command("clear", epilog=CLEAR_EXAMPLES)
@click.argument("model", required=False)
@click.option("-y", "--yes", is_flag=True, help="Clear the cache of every model without asking.")
def clear_models(model: str | None, yes: bool) -> None:
    """Clear the cache of MODEL, or of all models.

    MODEL is a name or an ID that `ingle cache ls` shows. The saved token ids of earlier replies are deleted in either
    case. Servers can keep running: they compute again what is missing.
    """
    settings = load_settings()
    models = cached_models(settings.kv_disk_dir)
    if model is not None:
        models = _chosen(models, model)
    elif not yes:
        _ask(models)
    done = _clear(settings.kv_disk_dir, models)
    click.echo(f"{format_bytes(done.freed)} freed in {settings.kv_disk_dir}.", err=True)
    if done.left:
        remedy = "Stop the programs that use them (ingle ps), check the owner of the files, and try again."
        raise AppError(f"{done.left} files in {settings.kv_disk_dir} could not be deleted", remedy)


@cache.command(epilog=VERIFY_EXAMPLES)
@click.option("--delete", "deletes", is_flag=True, help="Delete the damaged files.")
@click.option("-q", "--quiet", is_flag=True, help="Print no progress and no summary.")
@click.pass_context
def verify(ctx: click.Context, deletes: bool, quiet: bool) -> None:
    """Read the whole cache and list the damaged files.

    This is optional: the engine detects a damaged file when it reads it, and computes its content again. The exit
    status is 1 if a file is damaged.
    """
    progress = progress_on_stderr(quiet=quiet)
    files = segment_files(load_settings().kv_disk_dir)
    size = sum(file.size for file in files)
    bad, done, left = 0, 0, ClearResult()
    with progress.task("Verifying the cache", size) as report:
        for file in files:
            if problem := find_damage(file.path):
                bad += 1
                click.echo(sanitize(f"{file.path}: {problem}"))
                left += delete(file.path) if deletes else ClearResult()
            done += file.size
            report(done)
    deleted = f", deleted: {bad - left.left}" if deletes else ""
    progress.say(f"Files: {len(files)}, {format_bytes(size)}. Damaged: {bad}{deleted}.")
    if left.left:
        raise AppError(f"{left.left} damaged files could not be deleted", "Check the owner of the files.")
    if bad:
        ctx.exit(EXIT_FAILURE)


def _chosen(models: list[CachedModel], name: str) -> list[CachedModel]:
    """Return the entries of the model with that name, or with that ID. Raises ModelNotFound if there are none."""
    entry = load_catalog().find(name)
    # A catalog model may have been loaded by its path. The cache records only the last part of a path.
    wanted, sha256 = (entry.name, entry.sha256) if entry else (Path(name).name, "")
    chosen = find_cached_models(models, wanted, sha256)
    if not chosen:
        raise ModelNotFound(f"the cache has no entry for {name}", "ingle cache ls lists the entries.")
    return chosen


def _ask(models: list[CachedModel]) -> None:
    """Ask the user to confirm. Raises AppError if stdin is not a terminal, and Abort if the answer is no."""
    if not sys.stdin.isatty():
        problem = "clearing the cache of every model needs confirmation, but stdin is not a terminal"
        raise AppError(problem, "ingle cache clear --yes")
    size = format_bytes(sum(model.size for model in models))
    click.confirm(f"Clear the cache of every model ({size})?", abort=True, err=True)


def _clear(root: Path, models: list[CachedModel]) -> ClearResult:
    done = ClearResult()
    for model in models:
        done += clear(model.folder)
    stem = FILE_NAME.partition(".")[0]  # also matches SQLite's files beside it, and damaged files that were renamed
    for path in root.glob(f"{stem}.*"):
        done += delete(path)
    return done


def _as_data(model: CachedModel) -> dict[str, object]:
    used = datetime.fromtimestamp(model.used / 1e9, UTC).isoformat(timespec="seconds")
    about = {
        "model": model.about.model,
        "sha256": model.about.sha256,
        "backend": model.about.backend,
        "kv_type": model.about.kv_type,
        "made": model.about.made,
    }
    amounts = {"files": model.files, "size": model.size, "blocks": model.blocks, "tokens": model.tokens}
    return {"id": model.fingerprint, **about, **amounts, "used": used, "folder": model.folder}


def _row(model: CachedModel) -> tuple[object, ...]:
    used = datetime.fromtimestamp(model.used / 1e9).astimezone().strftime("%Y-%m-%d %H:%M")
    about = (model.about.model, model.about.backend, model.about.kv_type)
    shown = (sanitize(text) or "-" for text in about)
    return model.fingerprint[:_ID_DIGITS], *shown, f"{model.tokens:,}", format_bytes(model.size), used
