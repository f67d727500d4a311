"""Serve a trained model over HTTP: ``ironfn serve``."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import model_options

if TYPE_CHECKING:
    import uvicorn

    from .web import Site

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
GRACE = 5.0
"""Seconds in which what is being written may come to its end after Ctrl-C; a second one ends it at once."""


@click.command("serve")
@model_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0 is everywhere.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--name", help="What clients call the model; else the name of its file or directory.")
@click.option("--template", metavar="NAME|FILE", help="Another chat template: chatml, llama3, … or a Jinja file.")
@click.option("--api-key-env", metavar="NAME", help="The environment variable with the key that clients must bring.")
@click.option("--rows", default=32, show_default=True, type=click.IntRange(1), help="Completions written at a time.")
@click.option(
    "--queue", "room", default=256, show_default=True, type=click.IntRange(1), help="And waiting, at the most."
)
@click.option("--cache-gb", type=click.FloatRange(0, min_open=True), help="1e9 bytes for the cache of keys and values.")
def command(
    model: Path,
    host: str,
    port: int,
    name: str | None,
    template: str | None,
    api_key_env: str | None,
    rows: int,
    room: int,
    cache_gb: float | None,
    dtype: str | None,
    int8: bool,
) -> None:
    """Serve MODEL (a run, a checkpoint, a Hugging Face directory, a GGUF file) as OpenAI's API does, and a chat page.

    It listens on this machine alone unless --host says otherwise. Ctrl-C ends it.
    """
    if lacking := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise ValueError(f"{' and '.join(lacking)} cannot be found; pip install 'ironfn[serve]'")
    key = _key(api_key_env)
    listening = _listen(host, port)  # a port that is taken is told before a model is read
    from ironfn.generate.engine import Limits

    from .service import Service
    from .web import Site
    from .writer import engine_of, for_writing

    trained = for_writing(model, dtype, int8)
    chat = trained.chat(template)
    service = Service(lambda: engine_of(trained, Limits(rows=rows), cache_gb=cache_gb), room)
    local = host in LOOPBACK or host == "::1"
    site = Site(service, trained, name or model.resolve().stem, chat, LOOPBACK if local else frozenset(), key)
    if not local and key is None:
        click.echo(f"anyone who reaches {host} can use this server; --api-key-env NAME asks for a key", err=True)
    click.echo(f"{site.name}: {_address(listening)} (a page to chat), {_address(listening)}/v1 (the API)", err=True)
    asyncio.run(_until_stopped(site, listening))


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"--api-key-env {variable}: there is no key in this environment variable")
    return key


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"{host}:{port} cannot be listened on ({error.strerror}); give another --port") from error


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def _until_stopped(site: Site, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, and then until what is being written has come to its end, or `GRACE` has."""
    import uvicorn

    config = uvicorn.Config(
        site.application(), http="h11", ws="none", lifespan="off", log_level="warning", access_log=False,
        server_header=False, timeout_graceful_shutdown=1,
    )  # fmt: skip

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield  # it would raise them again at the end

    server = Server(config)
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()

    def stop() -> None:
        server.force_exit = stopping.is_set()
        site.service.closing = True
        stopping.set()

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop)
    work = asyncio.ensure_future(server.serve([listening]))
    await asyncio.wait({work, asyncio.ensure_future(stopping.wait())}, return_when=asyncio.FIRST_COMPLETED)
    await _drained(site, server)
    server.should_exit = True
    await work
    await asyncio.to_thread(site.service.close)


async def _drained(site: Site, server: uvicorn.Server) -> None:
    """Wait until nothing is being written; not for ever."""
    end = asyncio.get_running_loop().time() + GRACE
    while site.service.held and not server.force_exit and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.02)
