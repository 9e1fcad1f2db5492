"""`ingle cache`: what is kept on disk of what was computed, and how to be rid of it."""

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
    Clearing,
    KeptModel,
    clear,
    delete,
    kept_models,
    limit_of,
    named,
    problem_of,
    run_files,
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
  ingle cache clear                 everything; asks first
  ingle cache clear --yes           everything, for scripts
  ingle cache clear smollm2:135m    what is of one model
  ingle cache clear 3f9a21c0        what has this ID in ingle cache ls
"""
VERIFY_EXAMPLES = """\b
Examples:
  ingle cache verify
  ingle cache verify --delete
"""

_ID_DIGITS = 8


@click.group(epilog=EXAMPLES)
def cache() -> None:
    """Show or delete what is kept on disk, so that a conversation is not computed again after a restart.

    It is as private as the conversations that it was computed from, and readable to you alone. The setting kv_disk_gb
    limits how much it is (0: nothing), and kv_disk_dir is its folder.
    """


@cache.command(epilog=LS_EXAMPLES)
@click.option("--json", "as_object", is_flag=True, help="Print a JSON object.")
def ls(as_object: bool) -> None:
    """List what is kept of each model, and the limit of all."""
    settings = load_settings()
    folder, models = settings.kv_disk_dir, kept_models(settings.kv_disk_dir)
    size = sum(model.size for model in models)
    limit = limit_of(folder, settings.kv_disk_limit, size)
    if as_object:
        click.echo(as_json({"folder": folder, "size": size, "limit": limit, "models": list(map(_as_data, models))}))
        return
    if models:
        echo_table([("ID", "MODEL", "BACKEND", "KV TYPE", "TOKENS", "SIZE", "LAST USED"), *map(_row, models)])
        click.echo()
    off = f"and nothing is added ({settings.origins['kv_disk_gb']})"
    click.echo(f"{format_bytes(size)} {f'of at most {format_bytes(limit)}' if limit else off} in {folder}")


@cache.command("clear", epilog=CLEAR_EXAMPLES)
@click.argument("model", required=False)
@click.option("-y", "--yes", is_flag=True, help="Delete everything without asking.")
def clear_models(model: str | None, yes: bool) -> None:
    """Delete what is kept of MODEL, or of all models.

    MODEL is a name or an ID of `ingle cache ls`. The ids of replies, which are kept beside it, are deleted either way.
    Servers may go on running: they compute again what they do not find.
    """
    settings = load_settings()
    models = kept_models(settings.kv_disk_dir)
    if model is not None:
        models = _chosen(models, model)
    elif not yes:
        _ask(models)
    done = _clear(settings.kv_disk_dir, models)
    click.echo(f"{format_bytes(done.freed)} freed in {settings.kv_disk_dir}.", err=True)
    if done.left:
        remedy = "End what uses them (ingle ps), see to whom they belong, and try again."
        raise AppError(f"{done.left} files in {settings.kv_disk_dir} could not be deleted", remedy)


@cache.command(epilog=VERIFY_EXAMPLES)
@click.option("--delete", "deletes", is_flag=True, help="Delete the files that are bad.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no narration.")
@click.pass_context
def verify(ctx: click.Context, deletes: bool, quiet: bool) -> None:
    """Read everything that is kept, and list the files that are bad.

    Nothing depends on it: a bad file is noticed when it is used, and what it held is computed again. Exits with 1 if a
    file was bad.
    """
    progress = progress_on_stderr(quiet=quiet)
    files = run_files(load_settings().kv_disk_dir)
    size = sum(file.size for file in files)
    bad, done, left = 0, 0, Clearing()
    with progress.task("Reading what is kept", size) as report:
        for file in files:
            if problem := problem_of(file.path):
                bad += 1
                click.echo(sanitize(f"{file.path}: {problem}"))
                left += delete(file.path) if deletes else Clearing()
            done += file.size
            report(done)
    deleted = f", deleted: {bad - left.left}" if deletes else ""
    progress.say(f"Files: {len(files)}, {format_bytes(size)}. Bad: {bad}{deleted}.")
    if left.left:
        raise AppError(f"{left.left} bad files could not be deleted", "See to whom they belong.")
    if bad:
        ctx.exit(EXIT_FAILURE)


def _chosen(models: list[KeptModel], name: str) -> list[KeptModel]:
    """What is kept of the model of that name, or has that ID."""
    entry = load_catalog().find(name)
    # A model of the catalog may have been used by its path; of a path, the last part is kept.
    chosen = named(models, entry.name, entry.sha256) if entry else named(models, Path(name).name)
    if not chosen:
        raise ModelNotFound(f"nothing is kept of {name}", "ingle cache ls shows what is.")
    return chosen


def _ask(models: list[KeptModel]) -> None:
    """Go on only if the user says so. Raises AppError where nobody can be asked, Abort for a no."""
    if not sys.stdin.isatty():
        raise AppError("this deletes what is kept of all models, and nobody can be asked", "ingle cache clear --yes")
    size = format_bytes(sum(model.size for model in models))
    click.confirm(f"Delete what is kept of all models ({size})?", abort=True, err=True)


def _clear(root: Path, models: list[KeptModel]) -> Clearing:
    done = Clearing()
    for model in models:
        done += clear(model.folder)
    stem = FILE_NAME.partition(".")[0]  # with the files that SQLite keeps beside it, and what was set aside
    for path in root.glob(f"{stem}.*"):
        done += delete(path)
    return done


def _as_data(model: KeptModel) -> dict[str, object]:
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


def _row(model: KeptModel) -> tuple[object, ...]:
    used = datetime.fromtimestamp(model.used / 1e9).astimezone().strftime("%Y-%m-%d %H:%M")
    about = (model.about.model, model.about.backend, model.about.kv_type)
    shown = (sanitize(text) or "-" for text in about)
    return model.fingerprint[:_ID_DIGITS], *shown, f"{model.tokens:,}", format_bytes(model.size), used
