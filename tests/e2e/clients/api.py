"""The HTTP surface, bare: what goes over the wire, without a library that smooths it."""

import asyncio
import base64
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from omni_common.frames import Fleet
from support.rig import PATIENCE_S


@dataclass
class Answer:
    """A chat answer, joined from its events."""

    text: str = ""
    sound: bytes = field(default=b"", repr=False)
    finish: str | None = None
    #: In order: "text", "sound", with the piece.
    pieces: list[tuple[str, Any]] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Body:
    status: int
    headers: Any
    data: bytes = field(repr=False)

    @property
    def error(self) -> dict[str, Any]:
        assert self.status >= 400, self
        assert self.headers["Content-Type"].startswith("application/json"), self
        error: dict[str, Any] = json.loads(self.data)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def say(question: str | Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A chat request that is answered in text and speech, the same way every time."""
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    body: dict[str, Any] = {"model": "embedded", "messages": messages, "temperature": 0, "seed": 7}
    body |= {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}
    return body | more


class Api:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def post(self, path: str, body: Any, **headers: str) -> Body:
        """`body`: anything for JSON, or bytes that are said to be JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return Body(response.status, response.headers, await response.read())

    async def get(self, path: str) -> Body:
        async with self.session.get(self.url + path) as response:
            return Body(response.status, response.headers, await response.read())

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.data[:500]
        completion: dict[str, Any] = json.loads(answer.data)
        return completion

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Every event of a stream, in order; `[DONE]` as it is."""
        answer = await self.post(path, body)
        assert answer.status == 200, answer.data[:500]
        assert answer.headers["Content-Type"].split(";")[0] == "text/event-stream"
        assert answer.data.endswith(b"\n\n")
        events = []
        for event in answer.data.decode()[:-2].split("\n\n"):
            if event.startswith(":"):
                continue
            assert event.startswith("data: ") and "\n" not in event
            events.append("[DONE]" if event == "data: [DONE]" else json.loads(event[6:]))
        return events

    async def chat_stream(self, body: dict[str, Any]) -> Answer:
        """A whole streamed answer; raises AssertionError for an error in it."""
        return join(await self.events("/v1/chat/completions", body | {"stream": True}))

    async def speech(self, text: str, form: str | None = "pcm", **more: Any) -> Body:
        return await self.post(
            "/v1/audio/speech",
            {"model": "tts-1", "input": text, "voice": "alloy", "response_format": form, "seed": 7} | more,
        )

    async def heard(self, sound: bytes, name: str = "speech.wav", **fields: str) -> str:
        """What the recogniser writes down of a file."""
        form = aiohttp.FormData({"model": "whisper-1", **fields})
        form.add_field("file", io.BytesIO(sound), filename=name)
        async with self.session.post(f"{self.url}/v1/audio/transcriptions", data=form) as response:
            body = await response.text()
            assert response.status == 200, body
        return body if "response_format" in fields or "stream" in fields else json.loads(body)["text"]

    async def fleet(self) -> Fleet:
        return msgspec.json.decode((await self.get("/omni/status")).data, type=Fleet)

    async def idle(self) -> Fleet:
        """Wait until nothing of any request is left in any process."""

        def empty(fleet: Fleet) -> bool:
            quiet = fleet.running == fleet.queued == 0
            return quiet and all(r.running == r.arena_used == 0 for r in fleet.replicas)

        return await self.wait_for(empty)

    async def wait_for(self, condition: Callable[[Fleet], bool], timeout_s: float = PATIENCE_S) -> Fleet:
        """The first state of the fleet for which `condition` holds."""
        async with asyncio.timeout(timeout_s):
            while not condition(fleet := await self.fleet()):
                await asyncio.sleep(0.01)
        return fleet


def join(events: list[Any]) -> Answer:
    """One chat answer in OpenAI's form from its events."""
    answer = Answer()
    assert events[-1] == "[DONE]", events[-1]
    for event in events[:-1]:
        assert "error" not in event, event
        for choice in event["choices"]:
            delta = choice["delta"]
            audio = delta.get("audio") or {}
            words = (delta.get("content") or "") + audio.get("transcript", "")
            if words:
                answer.text += words
                answer.pieces.append(("text", words))
            if "data" in audio:
                data = base64.b64decode(audio["data"], validate=True)
                answer.sound += data
                answer.pieces.append(("sound", data))
            answer.finish = choice["finish_reason"] or answer.finish
    return answer
