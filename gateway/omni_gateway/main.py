"""`omni-gateway`: the HTTP API on one address, over the bus."""

import argparse
import logging
import os
import socket
from pathlib import Path

from aiohttp import web

from omni_common.errors import OmniError
from omni_common.ids import default_name
from omni_common.service import Common, Stop, run_service
from omni_gateway.app import create_app, make_runner
from omni_gateway.context import DRAIN, Settings
from omni_gateway.link import Link

log = logging.getLogger("omni.gateway")

#: Seconds that requests in flight get when the gateway is asked to end, and handlers to give up after that.
DRAIN_S = 25.0
CANCEL_S = 1.0


async def serve(arguments: argparse.Namespace, common: Common, stop: Stop) -> None:
    link = Link(common.run, arguments.name, common.pipelines, arguments.arena_mib, stop)
    await link.start()
    settings = Settings(
        api_keys=tuple(arguments.api_key + os.environ.get("OMNI_API_KEY", "").split()),
        cors_origins=tuple(arguments.cors_origin),
        max_body_bytes=arguments.max_body_mib << 20,
        chat_audio_form=arguments.chat_audio_form,
        voices=arguments.voices or default_voices(),
    )
    app = create_app(link, settings)
    runner = make_runner(app, shutdown_s=CANCEL_S)
    try:
        await runner.setup()
        sites = await _listen(runner, arguments)
        log.info("listening on %s", ", ".join(site.name for site in sites))
        await stop.wait()
        for site in sites:
            await site.stop()
        server = runner.server
        assert server is not None
        await app[DRAIN].wait(lambda: server.connections, DRAIN_S)
    finally:
        await runner.cleanup()
        await link.close()


def default_voices() -> Path | None:
    """`$XDG_DATA_HOME/omnibus/voices`, else `~/.local/share/omnibus/voices`; `None` for a user without a home."""
    given = Path(os.environ.get("XDG_DATA_HOME", ""))
    try:
        # The specification has a relative one ignored.
        data = given if given.is_absolute() else Path.home() / ".local" / "share"
    except RuntimeError:
        return None
    return data / "omnibus" / "voices"


async def _listen(runner: web.AppRunner, arguments: argparse.Namespace) -> list[web.BaseSite]:
    """Raises OmniError when the address, or a descriptor that was handed down, cannot be listened at."""
    try:
        sites: list[web.BaseSite] = [
            web.SockSite(runner, socket.socket(fileno=descriptor)) for descriptor in arguments.listen_fd
        ] or [web.TCPSite(runner, arguments.host, arguments.port, reuse_port=arguments.reuse_port or None)]
        for site in sites:
            await site.start()
    except OSError as error:
        address = f"{arguments.host} port {arguments.port}"
        raise OmniError(f"cannot listen on {arguments.listen_fd or address}: {error.strerror}") from None
    return sites


def main() -> int:
    parser = argparse.ArgumentParser(prog="omni-gateway", description=__doc__)
    parser.add_argument("--name", default=default_name("gateway"), help="how logs and `omni status` call it")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--listen-fd", type=int, action="append", default=[], metavar="FD",
        help="accept at this listening socket, which was handed down, instead of at --host and --port",
    )  # fmt: skip
    parser.add_argument("--reuse-port", action="store_true", help="share the port with other gateways of this host")
    parser.add_argument(
        "--api-key", action="append", default=[], help="asked for on every route but /health; several are possible "
        "(also OMNI_API_KEY, separated by spaces, which other users of this machine cannot see)",
    )  # fmt: skip
    parser.add_argument("--cors-origin", action="append", default=[], help="origin of pages that may call; * for all")
    parser.add_argument("--max-body-mib", type=int, default=64)
    parser.add_argument("--arena-mib", type=int, default=64, help="shared memory for media that clients send")
    parser.add_argument(
        "--chat-audio-form", choices=["openai", "content"], default="openai", help="layout of streamed chat audio"
    )
    parser.add_argument(
        "--voices", type=Path, metavar="DIR",
        help=f"where uploaded voices are kept; gateways may share it (default {default_voices() or 'none'})",
    )  # fmt: skip
    return run_service(parser, serve)


if __name__ == "__main__":
    raise SystemExit(main())
