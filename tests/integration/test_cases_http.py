"""Cases that need the real bus behind HTTP: who gets whose answer, what is lost, what a stranger's bytes do."""

import asyncio
import base64
import json
import os
import pickle
import random
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import zmq

from omni_common.frames import Text
from omni_gateway.stream import Ask, Given
from support.http import gateway
from support.rig import Rig, fake, running, until

CHAT = "/v1/chat/completions"
RATE = 24_000
#: What a fake talker makes of each word.
WORD_SAMPLES = 2400


def spoken(text: str, **more: Any) -> dict[str, Any]:
    audio = {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
    return {"model": "spoken", "messages": [{"role": "user", "content": text}], **audio, **more}


@pytest.fixture
async def served() -> AsyncIterator[tuple[Rig, str]]:
    async with running(fake("spoken")) as rig, gateway(rig) as url:
        yield rig, url


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(url + CHAT, json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def streamed(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[Any]:
    async with http.post(url + CHAT, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    frames = [frame.removeprefix("data: ") for frame in text.removesuffix("\n\n").split("\n\n")]
    return [frame if frame == "[DONE]" else json.loads(frame) for frame in frames]


async def test_the_stream_has_the_samples_of_the_whole_answer(served: tuple[Rig, str]) -> None:
    """B001, B015, B016: both halves, sample by sample; then the reason, the usage, and the end mark."""
    rig, url = served
    body = spoken("say 5 words 12 times", seed=3)
    async with aiohttp.ClientSession() as http:
        whole = await post(http, url, body)
        *chunks, finish, usage, done = await streamed(http, url, {**body, "stream_options": {"include_usage": True}})
    audio = whole["choices"][0]["message"]["audio"]
    pieces = [chunk["choices"][0]["delta"].get("audio", {}) for chunk in chunks]
    assert "".join(piece.get("transcript", "") for piece in pieces) == audio["transcript"] == "say 5 words 12 times"
    sound = b"".join(base64.b64decode(piece["data"]) for piece in pieces if "data" in piece)
    assert sound == base64.b64decode(audio["data"]) and len(sound) == 2 * 5 * WORD_SAMPLES
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert done == "[DONE]"
    await rig.idle()


async def test_what_is_asked_for_in_one_instant_is_kept_apart(served: tuple[Rig, str]) -> None:
    """B027: an id each, and under it the words and the tone that this client asked for, streamed and whole."""
    rig, url = served

    async def one(number: int) -> tuple[str, str]:
        body = spoken(f"{number} x{number}", user="the same", metadata={"id": "1"})
        headers = {"x-request-id": "the-same"}
        async with aiohttp.ClientSession(headers=headers) as http:
            await barrier.wait()
            if number % 2:
                *chunks, _ = await streamed(http, url, body)
                assert len({chunk["id"] for chunk in chunks}) == 1
                answer_id = chunks[0]["id"]
                pieces = [chunk["choices"][0]["delta"].get("audio", {}) for chunk in chunks]
                audio_id = pieces[0]["id"]
                words = "".join(piece.get("transcript", "") for piece in pieces)
                sound = b"".join(base64.b64decode(piece.get("data", "")) for piece in pieces)
            else:
                answer = await post(http, url, body)
                audio = answer["choices"][0]["message"]["audio"]
                answer_id, audio_id, words = answer["id"], audio["id"], audio["transcript"]
                sound = base64.b64decode(audio["data"])
        assert words == f"{number} x{number}"
        samples = np.frombuffer(sound, "<i2")
        assert len(samples) == 2 * WORD_SAMPLES
        peak = np.abs(np.fft.rfft(samples[:WORD_SAMPLES])).argmax() * RATE / WORD_SAMPLES
        assert abs(peak - (200 + 10 * number)) <= 10
        return answer_id, audio_id

    barrier = asyncio.Barrier(16)
    ids = await asyncio.gather(*(one(number) for number in range(16)))
    assert len({answer for answer, _ in ids}) == len({audio for _, audio in ids}) == 16
    await rig.idle()


async def test_text_is_answered_without_a_sound_of_the_talker(served: tuple[Rig, str]) -> None:
    """B019: while it is stopped, and it has not been given anything when it wakes."""
    rig, url = served
    (before,) = rig.replicas("talker")
    rig.kill("talker", signal.SIGSTOP)
    body = {**spoken("only words"), "modalities": ["text"]}
    async with aiohttp.ClientSession() as http:
        answer = await post(http, url, body)
        assert answer["choices"][0]["message"]["content"] == "only words"
        assert "audio" not in answer["choices"][0]["message"] or answer["choices"][0]["message"]["audio"] is None
        events = await streamed(http, url, body)
        assert events[-1] == "[DONE]"
        rig.kill("talker", signal.SIGCONT)
        await post(http, url, spoken("now aloud"))
    await until(lambda: [replica.steps for replica in rig.replicas("talker")] != [before.steps])
    await rig.idle()


COUPLED = """
name: coupled
stages:
  reader: {engine: fake, model: identity, slots: 64}
  talker: {engine: fake, model: tone, inputs: [reader], slots: 64, options: {step_s: 0.002}}
tasks:
  chat:
    input: {text: reader}
    output: {text: reader, audio: talker}
limits: {queue: 64}
"""


async def test_however_tokens_are_packed_none_is_lost_between_stages(tmp_path: Path) -> None:
    """B053: 0, 1, 2 or 5 tokens in a message, to a slow talker; messages that only say that this was the end."""
    chance = random.Random(53)
    file = tmp_path / "coupled.yaml"
    file.write_text(COUPLED)
    async with running(str(file)) as rig:

        async def one(number: int) -> None:
            sizes = [chance.choice((0, 1, 2, 5)) for _ in range(40)]
            texts, given, start = [], [], 0
            for size in sizes:
                texts.append("".join(f"{number}.{start + i} " for i in range(size)))
                given.append(Given("text", Text(texts[-1]), start, start + size, False, {}))
                start += size
            # The end comes with the last token, or alone.
            if number % 2:
                given.append(Given("text", Text(""), start, start, True, {}))
            else:
                texts.append("the end")
                given.append(Given("text", Text("the end"), start, start + 1, True, {}))
                start += 1
            events = await rig.answer(Ask(rig.pipeline, "chat", ["text", "audio"], given, 1, {}))
            said = "".join(event.body.text for event in events if event.modality == "text" and event.body)
            heard = [event for event in events if event.modality == "audio"]
            assert said == "".join(event.body.text for event in heard) == "".join(texts)
            assert [event.end for event in events if event.modality == "text"][-1] == start
            sound = sum(len(event.arrays["samples"]) for event in heard)
            assert sound == heard[-1].end == WORD_SAMPLES * sum(bool(text) for text in texts)
            assert [event.last for event in heard] == [False] * (len(heard) - 1) + [True]

        await asyncio.gather(*(one(number) for number in range(24)))
        await rig.idle()


async def test_aborted_streams_give_everything_back(tmp_path: Path) -> None:
    """B059: sound in shared memory, clients that leave before its end; also payloads of no bytes and of none."""
    before = set(os.listdir("/dev/shm"))
    async with running(fake("spoken"), "stages.talker.options.rate=96000") as rig, gateway(rig) as url:
        text = "word " * 200
        for number in range(40):
            async with (
                aiohttp.ClientSession() as http,
                http.post(url + CHAT, json=spoken(text, stream=True)) as response,
            ):
                assert response.status == 200
                while b'"data"' not in await response.content.readuntil(b"\n\n"):
                    pass
                for _ in range(number % 7):
                    await response.content.readuntil(b"\n\n")
                response.close()
        await rig.idle()
        assert set(os.listdir("/dev/shm")) == before
        async with aiohttp.ClientSession() as http:
            assert await post(http, url, spoken("still here"))
    async with running(fake("identity3")) as rig:
        for arrays in ({}, {"none": np.zeros(0, np.float32)}, {"a": np.zeros((0, 7)), "b": np.zeros(100_000)}):
            (event,) = await rig.answer(rig.ask("", arrays=arrays))
            assert {name: array.shape for name, array in event.arrays.items()} == {
                name: array.shape for name, array in arrays.items()
            }
        await rig.idle()
        await until(lambda: rig.link._node.arena.used == 0)


HOSTILE = [
    pickle.dumps({"id": 1}),
    b"",
    b"\xff" * 10_000,
    b"\n",
    b"0" * 16 + b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x81\xa4type\xa5chunk",
    b"\x93" * 10_000,
    os.urandom(4096),
]


def sockets_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_socket()]


def send_raw(path: Path, data: bytes) -> None:
    """To whatever listens there; it may hang up before all is sent."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(5)
        try:
            stranger.connect(os.fspath(path))
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
        except OSError:
            return


async def test_hostile_bytes_at_every_socket_disturb_nobody(served: tuple[Rig, str]) -> None:
    """B081: garbage, pickles and half frames, raw and as ZeroMQ messages, while a stream runs."""
    rig, url = served
    paths = sockets_in(rig.run.path)
    # The scheduler's two; an inbox and an arena's for each of two workers and two gateways.
    assert len(paths) >= 10, paths
    pids = {name: process.pid for name, process in rig.processes.items()}
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with aiohttp.ClientSession() as http:
        asking = asyncio.create_task(streamed(http, url, spoken("word " * 300)))
        await until(lambda: sum(replica.running for replica in rig.replicas("thinker")) > 0 or asking.done())
        for path in paths:
            for data in HOSTILE:
                await asyncio.to_thread(send_raw, path, data)
            for kind in (zmq.PUSH, zmq.DEALER):
                stranger = context.socket(kind)
                stranger.set(zmq.LINGER, 0)
                stranger.set(zmq.SNDTIMEO, 100)
                stranger.connect(f"ipc://{path}")
                if stranger.poll(50, zmq.POLLOUT):
                    for data in HOSTILE:
                        stranger.send_multipart([data, data], zmq.NOBLOCK)
                stranger.close()
        *chunks, done = await asking
        assert done == "[DONE]"
        words = "".join(chunk["choices"][0]["delta"].get("audio", {}).get("transcript", "") for chunk in chunks)
        assert words.split() == ["word"] * 300
        answer = await post(http, url, spoken("still here"))
        assert answer["choices"][0]["message"]["audio"]["transcript"] == "still here"
    context.term()
    assert {name: process.pid for name, process in rig.processes.items() if process.poll() is None} == pids
    assert all(rig.ready(stage) == 1 for stage in ("thinker", "talker"))
    await rig.idle()
