"""The HTTP client of the command line: one request, errors as one clear line."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from omni_common.errors import OmniError

#: Seconds to connect, and to wait for the next bytes of an answer.
CONNECT_S = 5.0
SILENCE_S = 300.0


class Client:
    """Talks to a gateway at `url`. Every method raises OmniError with a message for people."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, **content: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful answer, whose body is still to be read. `content`: `json=` or `data=` of aiohttp."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session,
                session.request(method, self._url + path, **content) as answer,
            ):
                if answer.status >= 400:
                    raise refusal(answer.status, await answer.read())
                yield answer
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            raise OmniError(f"{self._url} is not a URL; --url wants http://HOST:PORT") from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            raise OmniError(f"no server at {self._url}; start one with: omni serve") from None
        except TimeoutError:
            raise OmniError(f"the server has said nothing for {SILENCE_S:g} s") from None
        except aiohttp.ClientError as error:
            raise OmniError(f"the connection broke: {error}") from None


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """JSON of each server-sent event, up to `[DONE]`. Raises OmniError for an error in band, or a missing end."""
    async for raw in answer.content:
        line = raw.decode().strip()
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = msgspec.json.decode(data)
        if "error" in event:
            raise refusal(answer.status, data.encode())
        yield event
    raise OmniError("the answer broke off before its end")


def refusal(status: int, body: bytes) -> OmniError:
    """The server's error object as one line; any other body shortened."""
    try:
        error = msgspec.json.decode(body)["error"]
        param = f" ({error['param']})" if error.get("param") else ""
        return OmniError(f"{error['message']}{param}", status=status)
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        said = " ".join(body.decode(errors="replace").split())[:200]
        return OmniError(f"the server answered {status}: {said}", status=status)
