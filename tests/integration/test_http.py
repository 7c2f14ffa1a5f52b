"""The HTTP surface over the real bus with fake stages: what unit tests with a rig bus cannot show."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from support.http import gateway
from support.rig import Rig, fake, running, until


@pytest.fixture
async def served() -> AsyncIterator[tuple[Rig, str]]:
    async with running(fake("spoken")) as rig, gateway(rig) as url:
        yield rig, url


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "spoken", "messages": [{"role": "user", "content": text}], **more}


async def post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as response:
        return response.status, await response.json()


async def test_chat_with_audio_streamed_and_whole(served: tuple[Rig, str]) -> None:
    """B001: the sound of the stream is the sound of the whole answer."""
    rig, url = served
    body = chat("say 5 words for me", modalities=["text", "audio"], audio={"voice": "alloy", "format": "pcm16"})
    body["audio"].pop("voice")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(**body)
        pieces, words, reasons = "", "", []
        stream = await client.chat.completions.create(**body, stream=True)
        async for chunk in stream:
            delta = chunk.choices[0].delta.model_dump()
            pieces += (delta.get("audio") or {}).get("data") or ""
            words += (delta.get("audio") or {}).get("transcript") or ""
            reasons.append(chunk.choices[0].finish_reason)
    message = whole.choices[0].message
    assert message.audio is not None and message.audio.transcript == words == "say 5 words for me"
    assert len(pieces) > 1000
    assert reasons[-1] == "stop" and reasons.count("stop") == 1
    await rig.idle()


async def test_a_stage_that_does_not_come_back_ends_the_stream_with_an_error_and_the_next_request_works() -> None:
    """B016: no silence, no [DONE], no finish reason after the error; B054: the next request works."""
    async with running(fake("tokens"), "limits.recover_s=1") as rig, gateway(rig) as url:
        events: list[str] = []
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{url}/v1/chat/completions", json={**chat("x", stream=True, max_tokens=1_000_000), "model": "tokens"}
            ) as response,
        ):
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: "):
                    events.append(line[6:].decode().strip())
                if len(events) == 20:
                    rig.kill("thinker")
        error = json.loads(events[-1])["error"]
        assert error["code"] == "stage_lost" and "thinker" in error["message"]
        assert "[DONE]" not in events and not any('"finish_reason":"stop"' in event for event in events)
        await rig.wait("thinker")
        rig.worker("thinker")
        status, answer = await post(url, {**chat("x", max_tokens=2), "model": "tokens"})
        assert status == 200 and answer["choices"][0]["message"]["content"] == "w0 w1"
        await rig.idle()


async def test_clients_that_go_away_cancel_in_every_stage() -> None:
    """B042, B044: streaming and not, with the production middlewares."""
    async with running(fake("tokens")) as rig, gateway(rig) as url:
        for stream in (True, False):
            body = {**chat("x", stream=stream, max_tokens=1_000_000), "model": "tokens"}
            async with aiohttp.ClientSession() as session:
                request = asyncio.create_task(session.post(f"{url}/v1/chat/completions", json=body))
                await until(lambda: sum(replica.running for replica in rig.replicas("thinker")) == 1)
                if stream:
                    response = await request
                    await response.content.read(100)
                    response.close()
                else:
                    request.cancel()
                    await asyncio.gather(request, return_exceptions=True)
            await rig.idle()


async def test_full_queue_is_429_with_retry_after() -> None:
    """B047 through HTTP: admitted ones finish, the rest is told at once, health still answers."""
    overrides = ("stages.thinker.slots=2", "limits.queue=4", "stages.thinker.options.step_s=0.002")
    async with running(fake("tokens"), *overrides) as rig, gateway(rig) as url, aiohttp.ClientSession() as session:

        async def one() -> int:
            body = {**chat("x", max_tokens=200), "model": "tokens"}
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                if response.status == 429:
                    assert int(response.headers["retry-after"]) >= 1
                    assert (await response.json())["error"]["code"] == "queue_full"
                return response.status

        statuses = await asyncio.gather(*(one() for _ in range(50)))
        assert statuses.count(200) == 6 and statuses.count(429) == 44
        async with session.get(f"{url}/health/ready") as response:
            assert response.status == 200
        await rig.idle()


async def test_ready_names_the_missing_stage_and_recovers(served: tuple[Rig, str]) -> None:
    """B056"""
    rig, url = served
    async with aiohttp.ClientSession() as session:

        async def ready() -> tuple[int, str]:
            async with session.get(f"{url}/health/ready") as response:
                return response.status, await response.text()

        assert (await ready())[0] == 200
        rig.kill("talker")
        await rig.wait("talker")
        await until(lambda: rig.ready("talker") == 0)
        status, text = await ready()
        while status == 200:
            status, text = await ready()
        assert status == 503 and "talker" in text
        status, answer = await post(url, chat("words only"))
        assert status == 200, answer
        rig.worker("talker")
        while (await ready())[0] != 200:
            pass
        async with session.get(f"{url}/metrics") as response:
            assert response.status == 200
        async with session.get(f"{url}/omni/status") as response:
            assert {replica["stage"] for replica in (await response.json())["replicas"]} == {"thinker", "talker"}


async def test_two_gateways_share_a_port_and_one_dies_alone(served: tuple[Rig, str]) -> None:
    rig, url = served
    async with gateway(rig) as other:
        body = chat("x " * 50)
        assert (await post(url, body))[0] == (await post(other, body))[0] == 200
        rig.kill(f"gateway-{other.rsplit(':', 1)[1]}", signal.SIGKILL)
        await rig.wait(f"gateway-{other.rsplit(':', 1)[1]}")
        assert (await post(url, body))[0] == 200
        await rig.idle()


async def test_a_first_chunk_that_does_not_come_is_504() -> None:
    overrides = ("stages.thinker.options.step_s=5", "limits.first_chunk_s=0.5")
    async with running(fake("tokens"), *overrides) as rig, gateway(rig) as url:
        status, answer = await post(url, {**chat("x", max_tokens=5), "model": "tokens"})
        assert status == 504 and answer["error"]["code"] == "first_chunk_timeout"
        await rig.idle()
