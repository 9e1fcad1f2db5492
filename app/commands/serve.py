"""`ingle serve`: serve a model to other programs over HTTP."""

import click

from app.commands.options import engine_options
from app.progress import progress_on_stderr
from app.settings.settings import DEFAULT_TLS_PORT, load_settings

OLLAMA_PORT = 11434  # the port of Ollama, which its clients connect to by default
EXAMPLES = """\b
Examples:
  ingle serve
  ingle serve --model ./model.gguf --port 8000
  ingle serve --model qwen3:8b --model all-minilm
  ingle serve --model ./model.gguf --alias gpt-4o,my-model
  ingle serve --ollama-port
  ingle serve --host 0.0.0.0 --api-key-file ./keys
  ingle serve --tls
  OPENAI_BASE_URL=http://127.0.0.1:4645/v1 OPENAI_API_KEY=none your-program
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    help="Model to load at the start: a short name, a Hugging Face repository, or the path of a GGUF file or a folder. "
    "Repeat it to list further models, which load when a request names them. Default: smollm2:135m.",
)
@click.option(
    "--alias",
    "--served-model-name",
    metavar="NAMES",
    help="Model names that clients can use, separated by commas. Default: the model's own name, or its file name.",
)
@click.option(
    "--host",
    help="Address to listen on. An address other than the default needs an API key. Default: 127.0.0.1 and ::1, "
    "this machine only.",
)
@click.option("--port", type=int, help="Port to listen on; 0 chooses a free port. Default: 4645.")
@click.option(
    "--ollama-port",
    type=int,
    is_flag=False,
    flag_value=OLLAMA_PORT,
    help=f"Listen on a second port for programs that expect Ollama: {OLLAMA_PORT} if no port is given. Default: none.",
)
@click.option(
    "--tls",
    "--tls-port",
    "tls_port",
    type=int,
    is_flag=False,
    flag_value=DEFAULT_TLS_PORT,
    help="Listen on a second port for other machines, by HTTPS and with an API key: "
    f"{DEFAULT_TLS_PORT} if no port is given. ingle share makes the key and the certificate. Default: none.",
)
@click.option(
    "--api-key-file",
    metavar="FILE",
    help="File of the API keys that clients need, one per line. Keys in INGLE_API_KEY are accepted as well. "
    "Default: none.",
)
@click.option(
    "--sampling-defaults",
    metavar="SOURCE",
    help="Source of sampling values that a request omits: model (its recommended values), or none (the defaults of "
    "each API). Default: model.",
)
@click.option(
    "--generic-tools/--no-generic-tools",
    default=None,
    help="Describe tools as text to models whose chat template does not support tools, or refuse such requests. "
    "Default: describe them.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    help="Limit of the RAM that all models use together: 20GB, or 50% of all. Default: auto, the free memory.",
)
@click.option(
    "--idle-exit",
    metavar="TIME",
    help="End the server this long after its last request: 30m, or 0 for never. Default: auto, 30m for a service that "
    "the next request starts again, and else never.",
)
@engine_options
@click.option("-q", "--quiet", is_flag=True, help="Print no progress and no log lines.")
def serve(quiet: bool, models: tuple[str, ...], **options: str | int | None) -> None:
    """Serve the models of this machine to other programs until Ctrl-C.

    The server speaks the APIs of OpenAI, Anthropic, Ollama, LM Studio, and llama.cpp. It loads any stored model that a
    request names, and unloads others if their memory is needed. The model of --model is downloaded on first use.
    `ingle run` uses a running server.

    Ctrl-C and `ingle stop` end the running replies, and then the server, with exit status 0 (130 before its model is
    loaded). A second Ctrl-C ends it at once.
    """
    first, *others = models or (None,)
    settings = load_settings(model=first, more_models=",".join(filter(None, others)) or None, **options)
    from app.server.host import run_host

    run_host(settings, progress_on_stderr(quiet=quiet))
