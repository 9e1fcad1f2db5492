"""A fake of every program in a llama.cpp build. The name that it is started under selects the program.

It prints recorded output of the real programs, and appends its arguments to a file in its folder. The server answers
completions with the requested number of one-letter tokens. A word in the model's path selects a failure.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(sys.argv[0])
ARGUMENTS = sys.argv[1:]

HELP = """-t,    --threads N                      number of CPU threads to use during generation
-np,   --parallel N                     number of server slots
-cram, --cache-ram N                    set the maximum cache size in MiB
--slots, --no-slots                     expose slots monitoring endpoint (default: enabled)
"""
START = """\
0.00.001.953 I cmn  common_param: common_params_print_info: build 1 (0c1e570) with GNU 12.2.0 for Linux x86_64
0.00.002.161 I cmn  common_param: system_info: n_threads = 2 (n_threads_batch = 2) / 2 | CPU : SSE3 = 1 | AVX2 = 1 | \
AVX512_VNNI = 1 | LLAMAFILE = 0 |
0.00.002.200 E srv  llama_server: cannot load the model
"""
SINGLE = """[
  {
    "build_commit": "0c1e570",
    "n_threads": 2,
    "n_prompt": %d,
    "n_gen": %d,
    "n_depth": %d,
    "avg_ns": 500000000,
    "stddev_ns": 0,
    "samples_ns": [ 500000000 ],
    "samples_ts": [ 64.0 ]
  }
]
"""
BATCHED = """
{"n_kv_max": 4096, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, "n_gpu_layers": -1, \
"n_threads": 2, "n_threads_batch": 2, "pp": 60, "tg": 23, "pl": 16, "n_kv": 1328, "t_pp": 1.5, \
"speed_pp": 640.0, "t_tg": 0.5, "speed_tg": 736.0, "t": 2.0, "speed": 664.0}

"""


def option(name: str) -> str:
    return ARGUMENTS[ARGUMENTS.index(name) + 1]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "dies" in option("-m"):
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(1)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(wanted["max_tokens"]):
            self.event({"choices": [{"text": "a", "index": 0, "finish_reason": None}]})
        usage = {"completion_tokens": wanted["max_tokens"], "prompt_tokens": len(wanted["prompt"])}
        self.event({"choices": [{"text": "", "index": 0, "finish_reason": "length"}], "usage": usage})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, event: object) -> None:
        self.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 # the library's name for the parameter
        pass


def main() -> int:
    with HERE.with_name("arguments").open("a") as file:
        print(json.dumps([HERE.name, *ARGUMENTS]), file=file)
    if "--help" in ARGUMENTS:
        print(HELP)
    elif "-v" in ARGUMENTS:
        print(START, file=sys.stderr)
        return 1
    elif "broken" in option("-m"):
        print("error: unable to load model", file=sys.stderr)
        return 1
    elif HERE.name == "llama-bench":
        print(SINGLE % (int(option("-p")), int(option("-n")), int(option("-d")) if "-d" in ARGUMENTS else 0))
    elif HERE.name == "llama-batched-bench":
        print(BATCHED)
    else:
        ThreadingHTTPServer(("127.0.0.1", int(option("--port"))), Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
