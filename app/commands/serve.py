"""`ingle serve`: a model for other programs, over HTTP on this machine."""

import click

from app.commands.options import gpu_options
from app.progress import progress_on_stderr
from app.settings.settings import load_settings

OLLAMA_PORT = 11434  # where Ollama listens, and its clients look
EXAMPLES = """\b
Examples:
  ingle serve
  ingle serve --model ./model.gguf --port 8000
  ingle serve --model ./model.gguf --alias gpt-4o,my-model
  ingle serve --ollama-port
  ingle serve --host 0.0.0.0 --api-key-file ./keys
  OPENAI_BASE_URL=http://127.0.0.1:4645/v1 OPENAI_API_KEY=none your-program
"""


@click.command(epilog=EXAMPLES)
@click.option("-m", "--model", help="A model of the catalog or of the Hub, or the path of a GGUF file or a folder.")
@click.option(
    "--alias",
    "--served-model-name",
    metavar="NAMES",
    help="Names that clients find the model by, separated by commas. Default: its own, without a path.",
)
@click.option("--host", help="Where to listen: 127.0.0.1, which means ::1 too; others need an API key.")
@click.option("--port", type=int, help="Port to listen on; 0 takes any that is free. Default: 4645.")
@click.option(
    "--ollama-port",
    type=int,
    is_flag=False,
    flag_value=OLLAMA_PORT,
    help=f"Serve programs that look for Ollama, too, on its port {OLLAMA_PORT} or another.",
)
@click.option("--api-key-file", metavar="FILE", help="API keys that programs need, one a line. Or INGLE_API_KEY.")
@click.option("--context", type=int, help="Longest prompt and answer together, in tokens.")
@click.option(
    "--sampling-defaults",
    metavar="SOURCE",
    help="Sampling of requests that leave it open: model (what it recommends, the default), or none (each API's own).",
)
@click.option(
    "--generic-tools/--no-generic-tools",
    default=None,
    help="Serve tools where a chat template has no place for them, or refuse them. Default: serve.",
)
@click.option("--threads", type=int, help="Threads of the CPU engine.")
@gpu_options
@click.option("--kernels", help="Kernels of the engine: auto, cuda, cpu or reference.")
@click.option("--quantize", metavar="METHOD", help="What 16- or 32-bit layers become: fp8, int4 or nf4.")
@click.option("--kv-disk-gb", metavar="GB", help="What was computed and is kept on disk, at most; 0: nothing. Or auto.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no narration.")
def serve(
    model: str | None,
    alias: str | None,
    host: str | None,
    port: int | None,
    ollama_port: int | None,
    api_key_file: str | None,
    context: int | None,
    sampling_defaults: str | None,
    generic_tools: bool | None,
    threads: int | None,
    kernels: str | None,
    device: str | None,
    gpu_memory: str | None,
    deterministic: bool | None,
    quantize: str | None,
    kv_disk_gb: str | None,
    quiet: bool,
) -> None:
    """Serve a model to other programs, until Ctrl-C.

    The endpoint speaks OpenAI's dialect. The model is fetched when it is used for the first time. `ingle run` uses a
    running server of the same model. Ended by Ctrl-C or `ingle stop`, the exit status is 0; a second Ctrl-C does not
    wait for anything.
    """
    settings = load_settings(
        model=model,
        alias=alias,
        host=host,
        port=port,
        ollama_port=ollama_port,
        api_key_file=api_key_file,
        context=context,
        sampling_defaults=sampling_defaults,
        generic_tools=generic_tools,
        threads=threads,
        kernels=kernels,
        device=device,
        gpu_memory=gpu_memory,
        deterministic=deterministic,
        quantize=quantize,
        kv_disk_gb=kv_disk_gb,
    )
    from app.server.host import run_host

    run_host(settings, progress_on_stderr(quiet=quiet))
