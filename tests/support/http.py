"""An HTTP server in front of a rig's instance: a real gateway process."""

import contextlib
import socket
from collections.abc import AsyncIterator

import aiohttp

from support.rig import Rig, until


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def gateway(rig: Rig, *arguments: str) -> AsyncIterator[str]:
    """Start `omni-gateway` beside the rig; gives its URL once it is ready."""
    port = free_port()
    name = f"gateway-{port}"
    rig.start(name, "omni_gateway.main", "--port", str(port), "--name", name, *arguments)
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as session:

        async def answers() -> bool:
            try:
                async with session.get(f"{url}/health/live") as response:
                    return response.status == 200
            except aiohttp.ClientConnectionError:
                return False

        up = False
        while not up:
            assert rig.processes[name].poll() is None, "the gateway ended"
            up = await answers()
    await until(lambda: rig.link.fleet is not None and rig.link.fleet.gateways >= 2)
    yield url
