"""`ccq serve MODEL`: an OpenAI-compatible server on this machine. It answers as transformers' own server does."""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Sequence

from ccq.cli import add_run_options
from ccq.names import positive

KEY = "CCQ_API_KEY"  # an argument would be seen by all who list processes


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ccq serve",
        description=(__doc__ or "").splitlines()[0],
        epilog=f"The environment variable {KEY} sets the key that clients must send. A --host that can be reached from "
        "outside needs one.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a shipped model, a run, a from_pretrained folder, or a name on the Hub")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port; 0 takes a free one (default: %(default)s)")
    add_run_options(parser)
    add("--batch", type=positive, default=16, help="requests generated together (default: %(default)s)")
    add("--context", type=positive, help="maximum tokens of prompt and answer (default: the training length)")
    add("--waiting", type=positive, default=512, help="maximum number of waiting requests (default: %(default)s)")
    arguments = parser.parse_args(argv)
    key = os.environ.get(KEY) or None
    if not is_loopback(arguments.host) and key is None:
        parser.error(f"--host: {arguments.host} can be reached from outside: set a key in {KEY}")
    if not 0 <= arguments.port < 2**16:
        parser.error(f"--port: expected 0 to 65535, got {arguments.port}")

    import fastapi  # noqa: F401 -- the three that transformers' server needs, named one by one where they are missing
    import openai  # noqa: F401
    import uvicorn

    from ccq.doctor import runnable
    from ccq.serve.app import build

    device, dtype = runnable(parser, arguments.device, arguments.dtype)
    app = build(arguments.model, device, dtype, key, arguments.batch, arguments.context, arguments.waiting)
    server = uvicorn.Server(uvicorn.Config(app, host=arguments.host, port=arguments.port, log_level="warning"))
    socket = server.config.bind_socket()  # before it is said where: port 0 is chosen here, and whoever reads it may ask
    socket.listen(server.config.backlog)
    address = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    print(f"{arguments.model} at http://{address}:{socket.getsockname()[1]}/v1", flush=True)
    server.run(sockets=[socket])
    return 0
