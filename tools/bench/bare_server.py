"""What `stream` is measured against: an aiohttp handler that streams recorded events, one write and one turn each.

`python -m tools.bench.bare_server PORT FILE PACE_S`
"""

import asyncio
import sys
from pathlib import Path

import uvloop
from aiohttp import web


async def serve(port: int, recorded: bytes, pace_s: float) -> None:
    events = [event + b"\n\n" for event in recorded.split(b"\n\n") if event]

    async def stream(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
            # As with tokens: the next event of this stream comes after those of the others.
            await asyncio.sleep(pace_s)
        await response.write_eof()
        return response

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/stream", stream)
    app.router.add_get("/", health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), Path(sys.argv[2]).read_bytes(), float(sys.argv[3])))
