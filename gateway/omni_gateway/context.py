"""What every handler of one application shares: its settings and the keys under which they find them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from aiohttp import web

from omni_gateway.drain import Drain
from omni_gateway.metrics import Metrics
from omni_gateway.stream import Bus
from omni_gateway.voice_store import VoiceStore

AudioForm = Literal["openai", "content"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How the HTTP API behaves; made once by `main.py` from the command line and the environment."""

    #: Any of these opens every route; empty: no key is asked for. Never shown, never logged.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    #: Origins of browser pages that may call; `*` for all; empty: CORS is off.
    cors_origins: tuple[str, ...] = ()
    #: Largest request body; 25 MiB of audio are 34 MiB of base64.
    max_body_bytes: int = 64 * 1024 * 1024
    #: Seconds in which a request's whole body must have arrived.
    body_timeout_s: float = 60.0
    #: An event stream that has nothing to say for so long sends a comment, so that proxies keep it open.
    keep_alive_s: float = 10.0
    #: Pipeline of a request that names no model; empty: the first that serves the task.
    default_pipeline: str = ""
    #: How streamed chat audio is laid out when the request does not say: see `chat_wire.py`.
    chat_audio_form: AudioForm = "openai"
    #: Where uploaded voices are kept, for all gateways that are given the same folder; `None`: none are taken.
    voices: Path | None = None


BUS = web.AppKey("bus", Bus)
SETTINGS = web.AppKey("settings", Settings)
METRICS = web.AppKey("metrics", Metrics)
DRAIN = web.AppKey("drain", Drain)
VOICES = web.AppKey("voices", VoiceStore)

#: The server's name for one HTTP request, echoed as `x-request-id`.
REQUEST_ID = web.RequestKey("request_id", str)
#: The client's own name for it, cut and cleaned.
CLIENT_REQUEST_ID = web.RequestKey("client_request_id", str)
#: The bus request that answers it.
RUN_ID = web.RequestKey("run_id", str)
#: `loop.time()` at its arrival.
ARRIVED = web.RequestKey("arrived", float)
#: Code of the error that the client was told, as a response or inside a stream that had begun with 200.
ERROR_CODE = web.RequestKey("error_code", str)
#: Digest of the API key that opened the route; empty when none is asked for.
KEY_DIGEST = web.RequestKey("key_digest", str)
