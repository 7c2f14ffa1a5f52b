"""The chat endpoint over a rig bus: what is asked of the bus, what comes back, what is refused."""

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import pytest_asyncio
import soundfile

from omni_common.errors import OmniError
from omni_common.frames import AudioPart, Prompt, TextPart
from omni_gateway.audio_store import AudioStore
from omni_gateway.context import Settings
from omni_gateway.media.decode import decode_audio
from unit.gateway.conftest import Serve, raw_post, raw_request
from unit.gateway.rig_bus import ANSWER, PROMPT_TOKENS, RATE, WORD_SAMPLES, RigBus, answer, tone

CHAT = "/v1/chat/completions"
TEXT = "".join(ANSWER)
USER = [{"role": "user", "content": "What is the capital of France?"}]
FORMATS = ["wav", "mp3", "flac", "opus", "aac", "pcm16"]
MAGIC = {
    "wav": (b"RIFF",),
    "mp3": (b"ID3", b"\xff\xfb", b"\xff\xf3"),
    "flac": (b"fLaC",),
    "opus": (b"OggS",),
    "aac": (b"\xff\xf1", b"\xff\xf9"),
}
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as sdk:
        yield sdk


async def ask(http: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with http.post(url + CHAT, json={"messages": USER, **body}) as response:
        return response.status, await response.json()


async def stream(http: aiohttp.ClientSession, url: str, headers: dict | None = None, **body: Any) -> list[Any]:
    """The `data:` events of a streamed answer; the last is the string `[DONE]` if the stream ended well."""
    async with http.post(url + CHAT, json={"messages": USER, "stream": True, **body}, headers=headers) as response:
        assert response.status == 200, await response.text()
        return events_of(await response.text())


def events_of(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    frames = [frame for frame in text[:-2].split("\n\n") if not frame.startswith(":")]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    datas = [frame.removeprefix("data: ") for frame in frames]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def wav(seconds: float, rate: int = 16_000) -> str:
    file = io.BytesIO()
    soundfile.write(file, 0.2 * np.sin(np.arange(int(seconds * rate)) * 0.1), rate, format="WAV")
    return base64.b64encode(file.getvalue()).decode()


def hear(seconds: float = 0.5) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": wav(seconds), "format": "wav"}}


def check_refused(status: int, body: dict[str, Any], param: str | None, bus: RigBus) -> dict[str, Any]:
    assert status == 400, body
    error = body["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not bus.asks, "it was submitted"
    return error


# --------------------------------------------------------------------------------------------------------------- text


async def test_a_text_answer(client: openai.AsyncOpenAI, bus: RigBus) -> None:
    got = await client.chat.completions.create(model="omnibus", messages=USER, max_tokens=5, temperature=0.5, seed=3)
    assert got.object == "chat.completion" and got.id.startswith("chatcmpl-") and got.model == "omnibus"
    [choice] = got.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (TEXT, "assistant", "stop")
    assert choice.message.audio is None
    assert got.usage and (got.usage.prompt_tokens, got.usage.completion_tokens) == (PROMPT_TOKENS, len(ANSWER))
    assert got.usage.total_tokens == PROMPT_TOKENS + len(ANSWER)
    [asked] = bus.asks
    assert asked.outputs == ["text"] and asked.seed == 3
    # No talker, no code2wav: they may be down.
    assert set(asked.params) == {"thinker"}
    assert asked.params["thinker"]["max_tokens"] == 5 and asked.params["thinker"]["temperature"] == 0.5
    assert asked.params["thinker"]["repetition_penalty"] == 1.1, "the YAML's default"
    [given] = asked.given
    assert (given.modality, given.start, given.end, given.last) == ("text", 0, 1, True)
    assert isinstance(given.body, Prompt)
    assert given.body.messages[0].parts == [TextPart(USER[0]["content"])]
    await bus.until(lambda b: b.completed == 1 and not b.open)


async def test_a_streamed_text_answer(client: openai.AsyncOpenAI, bus: RigBus) -> None:
    chunks = [c async for c in await client.chat.completions.create(model="omnibus", messages=USER, stream=True)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == TEXT
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {c.id for c in chunks} == {chunks[0].id} and all(c.usage is None for c in chunks)
    assert {c.object for c in chunks} == {"chat.completion.chunk"}


async def test_tokens_are_streamed_one_by_one(client: openai.AsyncOpenAI, bus: RigBus) -> None:
    bus.gates = {number: asyncio.Event() for number in range(1, len(ANSWER) + 1)}
    seen = []
    async with asyncio.timeout(5):
        async for chunk in await client.chat.completions.create(model="omnibus", messages=USER, stream=True):
            if chunk.choices[0].delta.content:
                seen.append(chunk.choices[0].delta.content)
                bus.gates[len(seen)].set()  # The next token exists only once this one has been read.
    assert seen == list(ANSWER)


async def test_the_headers_of_a_stream(url: str, http: aiohttp.ClientSession) -> None:
    async with http.post(url + CHAT, json={"messages": USER, "stream": True}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_a_cut_answer_says_length(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    bus.script = answer(["too"], finish="length")
    _, body = await ask(http, url)
    assert body["choices"][0]["finish_reason"] == "length"
    events = await stream(http, url, **SPOKEN)
    assert events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("options", "counted"),
    [({"include_usage": True}, True), ({"include_usage": False}, False), ({}, False), (None, False),
     ({"include_usage": None}, False), ({"include_usage": True, "continuous_usage_stats": True}, True)],
)  # fmt: skip
@pytest.mark.parametrize("extra", [{}, SPOKEN, {**SPOKEN, "audio_form": "content"}])
async def test_the_usage_chunk(url: str, http: aiohttp.ClientSession, options: Any, counted: bool, extra: Any) -> None:
    *chunks, done = await stream(http, url, stream_options=options, **extra)
    assert done == "[DONE]"
    if counted:
        last = chunks.pop()
        assert last["choices"] == [] and last["usage"]["prompt_tokens"] == PROMPT_TOKENS
        audio_tokens = last["usage"]["completion_tokens_details"]["audio_tokens"]
        # 0.5 s at a token for each 50 ms.
        assert audio_tokens == (10 if extra else 0)
        assert last["usage"]["completion_tokens"] == len(ANSWER) + audio_tokens
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)


# -------------------------------------------------------------------------------------------------------------- audio


@pytest.mark.parametrize("fmt", FORMATS)
async def test_a_spoken_answer_in_every_format(client: openai.AsyncOpenAI, bus: RigBus, fmt: str) -> None:
    got = await client.chat.completions.create(
        model="omnibus", messages=USER, modalities=["text", "audio"], audio={"voice": "alloy", "format": fmt}
    )
    message = got.choices[0].message
    assert message.content is None and message.audio
    assert message.audio.id and message.audio.transcript == TEXT and message.audio.expires_at > got.created
    assert got.usage and got.usage.completion_tokens_details
    assert got.usage.completion_tokens_details.audio_tokens == 10
    data = base64.b64decode(message.audio.data, validate=True)
    assert await seconds_of(data, fmt) == pytest.approx(0.5, abs=0.1)
    [asked] = bus.asks
    assert asked.outputs == ["text", "audio"]
    assert asked.params["talker"]["voice"] == "heart" and set(asked.params) == {"thinker", "talker", "code2wav"}


@pytest.mark.parametrize("fmt", FORMATS)
async def test_a_streamed_spoken_answer_is_one_file(url: str, http: aiohttp.ClientSession, fmt: str) -> None:
    *chunks, finish, done = await stream(http, url, modalities=["text", "audio"], audio={"format": fmt})
    assert done == "[DONE]" and finish["choices"][0]["finish_reason"] == "stop"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert deltas[0]["role"] == "assistant" and all("content" not in delta for delta in deltas)
    audio = [delta["audio"] for delta in deltas]
    # SDKs join the strings of deltas, so the id comes once, first.
    assert [set(piece) for piece in audio if "id" in piece] == [{"id"}] and "id" in audio[0]
    assert set(audio[-1]) == {"expires_at"}
    assert "".join(piece.get("transcript", "") for piece in audio) == TEXT
    pieces = [base64.b64decode(piece["data"], validate=True) for piece in audio if "data" in piece]
    assert len(pieces) > 1 and all(pieces)
    if fmt == "pcm16":
        assert all(len(piece) % 2 == 0 for piece in pieces)
        assert len(b"".join(pieces)) == 2 * WORD_SAMPLES * len(ANSWER)
    assert await seconds_of(b"".join(pieces), fmt) == pytest.approx(0.5, abs=0.1)
    if fmt in ("wav", "flac"):
        assert b"".join(pieces).count(MAGIC[fmt][0]) == 1


async def seconds_of(data: bytes, fmt: str) -> float:
    if fmt == "pcm16":
        return len(data) / 2 / RATE
    assert data.startswith(MAGIC[fmt])
    return len(await decode_audio(data, max_seconds=60, max_bytes=1 << 24)) / 16_000


async def test_streamed_samples_are_the_samples_of_the_whole_answer(url: str, http: aiohttp.ClientSession) -> None:
    _, body = await ask(http, url, **SPOKEN)
    events = await stream(http, url, **SPOKEN)
    pieces = [e["choices"][0]["delta"].get("audio", {}).get("data", "") for e in events[:-1]]
    assert b"".join(base64.b64decode(p) for p in pieces) == base64.b64decode(
        body["choices"][0]["message"]["audio"]["data"]
    )
    samples = np.frombuffer(b"".join(base64.b64decode(p) for p in pieces), "<i2") / 32767
    assert np.abs(samples - tone(WORD_SAMPLES * len(ANSWER))).max() < 1e-4


async def test_openai_accumulates_a_spoken_stream(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="omnibus", messages=USER, modalities=["text", "audio"], audio={"voice": "alloy", "format": "pcm16"}
    ) as events:
        async for _ in events:
            pass
        final = await events.get_final_completion()
    audio = final.choices[0].message.audio
    assert audio and audio.id.count("audio_") == 1 and audio.transcript == TEXT and audio.expires_at


@pytest.mark.parametrize(
    ("settings", "headers", "body"),
    [
        (Settings(chat_audio_form="content"), {}, {}),
        (Settings(), {"x-omni-audio-form": "content"}, {}),
        (Settings(), {"x-omni-audio-form": "openai"}, {"audio_form": "content"}),
    ],
)
@pytest.mark.parametrize("modalities", [["text", "audio"], ["audio"]])
async def test_the_content_form(
    serve: Serve, http: aiohttp.ClientSession, settings: Settings, headers: Any, body: Any, modalities: list[str]
) -> None:
    url = await serve(settings)
    chunks = await stream(http, url, headers, modalities=modalities, audio={"format": "wav"}, **body)
    chunks = chunks[:-1]
    assert all("audio" not in chunk["choices"][0]["delta"] for chunk in chunks)
    assert {chunk["modality"] for chunk in chunks} == set(modalities)
    said = [c["choices"][0]["delta"].get("content", "") for c in chunks if c["modality"] == "text"]
    assert "".join(said) == (TEXT if "text" in modalities else "")
    sound = [c["choices"][0]["delta"].get("content") for c in chunks if c["modality"] == "audio"]
    files = [base64.b64decode(piece) for piece in sound if piece]
    assert [await seconds_of(file, "wav") for file in files] == pytest.approx([0.1] * len(ANSWER))
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_an_answer_that_cannot_be_spoken_is_a_little_silence(
    url: str, http: aiohttp.ClientSession, bus: RigBus
) -> None:
    bus.script = answer(["😄"], sound=False)
    _, body = await ask(http, url, modalities=["audio"])
    message = body["choices"][0]["message"]
    assert message["content"] is None and message["audio"]["transcript"] == "😄"
    assert await seconds_of(base64.b64decode(message["audio"]["data"]), "wav") == pytest.approx(0.1)
    for form in ("openai", "content"):
        events = await stream(http, url, audio_form=form, **SPOKEN)
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        data = [d["audio"]["data"] for d in deltas if "data" in d.get("audio", {})]
        if form == "content":
            data = [e["choices"][0]["delta"]["content"] for e in events[1:-2] if e["modality"] == "audio"]
        assert len(b"".join(base64.b64decode(piece) for piece in data)) == 2 * RATE // 10


async def test_audio_without_modalities_means_both(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    await ask(http, url, audio={"voice": {"id": "heart"}})
    await ask(http, url, audio=None)
    await ask(http, url, audio={}, modalities=["text"])
    assert [asked.outputs for asked in bus.asks] == [["text", "audio"], ["text"], ["text"]]


# ------------------------------------------------------------------------------------------------------ conversations


async def test_heard_audio(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    content = [{"type": "text", "text": "Compare:"}, hear(0.5), hear(0.25)]
    status, body = await ask(http, url, messages=[{"role": "user", "content": content}])
    assert status == 200
    assert body["usage"]["prompt_tokens_details"]["audio_tokens"] == 8  # 0.75 s, one for each 100 ms begun
    assert body["usage"]["prompt_tokens"] == PROMPT_TOKENS + 8
    [asked] = bus.asks
    prompt, *audio = asked.given
    assert prompt.body.messages[0].parts == [TextPart("Compare:"), AudioPart(0), AudioPart(1)]
    assert [(g.start, g.end, g.last, g.body.index, g.body.rate) for g in audio] == [
        (0, 8000, False, 0, 16_000),
        (8000, 12_000, True, 1, 16_000),
    ]
    assert all(g.arrays["samples"].dtype == np.float32 and len(g.arrays["samples"]) == g.end - g.start for g in audio)
    assert set(asked.params) == {"listener", "thinker"}


async def test_a_conversation_with_an_audio_id(client: openai.AsyncOpenAI, bus: RigBus) -> None:
    kwargs = {"model": "omnibus", "modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}
    first = await client.chat.completions.create(messages=USER, **kwargs)
    spoken = first.choices[0].message
    chunks = [c async for c in await client.chat.completions.create(messages=USER, stream=True, **{**kwargs, **SPOKEN})]
    streamed_id = chunks[0].choices[0].delta.model_dump()["audio"]["id"]
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Very."}]},
        *USER,
        spoken.model_dump(exclude_none=True),
        {"role": "user", "content": "Sure?", "name": "Ann"},
        {"role": "assistant", "content": None, "audio": {"id": streamed_id}},
        {"role": "user", "content": "Really?"},
    ]
    await client.chat.completions.create(messages=history, model="omnibus")
    messages = bus.asks[-1].given[0].body.messages
    assert [m.role for m in messages] == ["system", "system", "user", "assistant", "user", "assistant", "user"]
    assert [m.parts[0].text for m in messages[3:]] == [TEXT, "Sure?", TEXT, "Really?"]


async def test_audio_ids_belong_to_a_key_and_to_the_assistant(
    serve: Serve, http: aiohttp.ClientSession, bus: RigBus
) -> None:
    url = await serve(Settings(api_keys=("one", "two")))
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    async with http.post(url + CHAT, json={"messages": USER, "modalities": ["audio"]}, headers=one) as response:
        audio_id = (await response.json())["choices"][0]["message"]["audio"]["id"]
    for key, role, named, status, param in (
        (one, "assistant", audio_id, 200, None),
        (two, "assistant", audio_id, 400, "messages[1].audio.id"),
        (one, "assistant", "audio_0", 400, "messages[1].audio.id"),
        (one, "user", audio_id, 400, "messages[1].audio"),
    ):
        history = [*USER, {"role": role, "audio": {"id": named}}, *USER]
        async with http.post(url + CHAT, json={"messages": history}, headers=key) as response:
            assert response.status == status
            if status == 400:
                assert (await response.json())["error"]["param"] == param


async def test_what_was_said_before_a_failure_is_remembered(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    bus.failures = {4: OmniError("lost", code="stage_lost")}
    events = await stream(http, url, **SPOKEN)
    bus.failures = {}
    history = [*USER, {"role": "assistant", "audio": {"id": events[0]["choices"][0]["delta"]["audio"]["id"]}}, *USER]
    status, _ = await ask(http, url, messages=history)
    assert status == 200
    assert bus.asks[-1].given[0].body.messages[1].parts == [TextPart("The capital ")]


def test_the_audio_store_forgets() -> None:
    now = 1000.0
    store = AudioStore(lambda: now, max_chars=1000)
    store.put("me", "a", "words", store.expiry())
    assert store.get("me", "a") == "words" and store.get("you", "a") is None
    now = 1000 + 3599
    assert store.get("me", "a") == "words"
    now = 1000 + 3600
    assert store.get("me", "a") is None
    for number in range(20):
        store.put("me", str(number), "x" * 100, store.expiry())
    assert store.get("me", "19") and not store.get("me", "0")
    store.put("me", "long", "x" * 5000, store.expiry())
    store.put("me", "next", "short", store.expiry())
    assert store.get("me", "next") == "short"


# --------------------------------------------------------------------------------------------------- parameters


async def test_sampling_parameters_reach_the_thinker(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    given = {
        "temperature": 1, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "frequency_penalty": 0.25, "presence_penalty": -1,
        "repetition_penalty": 1.5, "ignore_eos": True, "min_tokens": 2, "stop_token_ids": [5],
    }  # fmt: skip
    status, body = await ask(
        http, url, **given, stop="END", logit_bias={"9": 0.5}, max_tokens=9, max_completion_tokens=7
    )
    assert status == 200, body
    thinker = bus.asks[0].params["thinker"]
    assert {key: thinker[key] for key in given} == given
    assert thinker["stop"] == ["END"] and thinker["max_tokens"] == 7 and thinker["logit_bias"] == ["9:0.500000"]
    await ask(http, url)
    await ask(http, url)
    assert bus.asks[1].seed != bus.asks[2].seed


async def test_sampling_params_list(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    listed = [
        None,
        {"temperature": 0.3, "stop": "x", "seed": 5, "top_k": None, "logit_bias": {"7": -1}},
        {"speed": 1.5},
    ]
    status, body = await ask(http, url, **SPOKEN, sampling_params_list=listed, temperature=0.9, max_tokens=11)
    assert status == 200, body
    params = bus.asks[0].params
    assert params["thinker"]["temperature"] == 0.3, "the list goes over the fields"
    assert params["thinker"]["max_tokens"] == 11 and params["thinker"]["stop"] == ["x"]
    assert params["thinker"]["logit_bias"] == ["7:-1.000000"]
    assert params["talker"] == {"voice": "heart", "speed": 1.5}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None}, *USER]}, "messages[0].content"),
        ({"messages": [*USER, {"content": "x"}]}, "messages[1].role"),
        ({"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
        ({"messages": [*USER, {"role": "function", "content": "x"}]}, "messages[1].role"),
        ({"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[1].tool_calls"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "system", "content": [hear()]}, *USER]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x" * 1001}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x" * 600}] * 2}, "messages[1].content"),
        ({"modalities": []}, "modalities"),
        ({"modalities": "audio"}, "modalities"),
        ({"modalities": ["image"]}, "modalities"),
        ({"modalities": ["text", "video"]}, "modalities[1]"),
        ({"audio": {"format": "xyz"}}, "audio.format"),
        ({"audio": {"format": "pcm"}}, "audio.format"),
        ({"audio": {"voice": "nobody"}}, "audio.voice"),
        ({"audio": {"voice": {"id": "nobody"}}}, "audio.voice"),
        ({"audio": {"voice": 4}}, "audio.voice"),
        ({"voice": "nobody"}, "voice"),
        ({"audio": "wav"}, "audio"),
        ({"audio_form": "other"}, "audio_form"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": 2**64}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": "true"}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias"),
        ({"logit_bias": {"5": "much"}}, "logit_bias"),
        ({"sampling_params_list": [{}, {"logit_bias": {"5": -101}}]}, "sampling_params_list[1].logit_bias"),
        ({"sampling_params_list": [{}, {"logit_bias": ["5:1"]}]}, "sampling_params_list[1].logit_bias"),
        ({"stop": ["x" * 257]}, "stop[0]"),
        ({"sampling_params_list": {}}, "sampling_params_list"),
        ({"sampling_params_list": [{}] * 5}, "sampling_params_list"),
        ({"sampling_params_list": [{}, {"temprature": 1}]}, "sampling_params_list[1].temprature"),
        ({"sampling_params_list": [{}, {"temperature": 5}]}, "sampling_params_list[1].temperature"),
        ({"sampling_params_list": [{}, {"seed": 2**80}]}, "sampling_params_list[1].seed"),
        ({"sampling_params_list": [{}, {"stop": {"a": 1}}]}, "sampling_params_list[1].stop"),
        ({"sampling_params_list": [{}, {}, {"speed": 9}]}, "sampling_params_list[2].speed"),
    ],
)
async def test_refused_by_the_name_of_the_field(
    url: str, http: aiohttp.ClientSession, bus: RigBus, body: Any, param: str
) -> None:
    for streamed in ({}, {"stream": True}):
        if "stream" not in body and not ("stream_options" in body and streamed):
            status, answered = await ask(http, url, **{**streamed, **body})
            check_refused(status, answered, param, bus)
        elif not streamed:
            check_refused(*await ask(http, url, **body), param, bus)


@pytest.mark.parametrize(
    ("audio", "field"),
    [
        (None, ""),
        ({}, ".data"),
        ({"data": ""}, ".data"),
        ({"data": "not base64!"}, ".data"),
        ({"data": "AAA"}, ".data"),
        ({"data": "UklG\nRg=="}, ".data"),
        ({"data": "é"}, ".data"),
        ({"data": base64.b64encode(b"no audio at all, but long enough").decode()}, ".data"),
        ({"data": "data:audio/wav;base64," + wav(0.1)}, ".data"),
        ({"data": wav(0.1), "format": "exe"}, ".format"),
        ({"data": wav(5.5)}, ".data"),
        ({"data": 5}, ".data"),
    ],
)
async def test_refused_audio(url: str, http: aiohttp.ClientSession, bus: RigBus, audio: Any, field: str) -> None:
    content = [{"type": "text", "text": "x"}, {"type": "input_audio", "input_audio": audio}]
    status, body = await ask(http, url, messages=[*USER, {"role": "user", "content": content}])
    check_refused(status, body, f"messages[1].content[1].input_audio{field}", bus)


async def test_all_audio_together_is_limited(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    messages = [{"role": "user", "content": [hear(3.0)]}, {"role": "user", "content": [hear(3.0)]}]
    status, body = await ask(http, url, messages=messages)
    check_refused(status, body, "messages[1].content[0].input_audio.data", bus)


async def test_a_model_that_does_not_chat(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    check_refused(*await ask(http, url, model="tts-1"), "model", bus)
    status, body = await ask(http, url, model="gpt-9")
    assert status == 404 and body["error"]["code"] == "model_not_found" and body["error"]["param"] == "model"


async def test_a_voice_error_lists_the_voices(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    error = check_refused(*await ask(http, url, audio={"voice": "nobody"}), "audio.voice", bus)
    assert "heart" in error["message"] and "michael" in error["message"]


async def test_unknown_fields_and_nulls_are_fine(url: str, http: aiohttp.ClientSession) -> None:
    names = (
        "model", "modalities", "audio", "voice", "stream", "stream_options", "sampling_params_list", "max_tokens",
        "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "frequency_penalty",
        "presence_penalty", "repetition_penalty", "ignore_eos", "n", "tools", "tool_choice", "functions", "logprobs",
        "function_call", "response_format", "top_logprobs", "logit_bias", "user", "metadata", "audio_form",
    )  # fmt: skip
    status, body = await ask(http, url, **dict.fromkeys(names))
    assert status == 200, body
    extras = {
        "foo": 1, "user": "u", "metadata": {}, "store": False, "parallel_tool_calls": True, "reasoning_effort": "low",
        "n": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False,
        "messages": [{"role": "user", "content": "x", "name": "n", "id": "1", "tool_calls": None, "audio": None}],
        "audio": {"format": None, "voice": None, "x": 1},
    }  # fmt: skip
    status, body = await ask(http, url, **extras)
    assert status == 200, body


@pytest.mark.parametrize(
    "spot",
    [
        '"messages":[{"role":"user","content":"?"}]',
        '"messages":[{"role":"?","content":"x"}]',
        '"messages":[{"role":"user","content":"x","name":"?"}]',
        '"messages":[{"role":"user","content":[{"type":"text","text":"?"}]}]',
        '"model":"?","messages":[{"role":"user","content":"x"}]',
        '"stop":["?"],"messages":[{"role":"user","content":"x"}]',
        '"audio":{"voice":"?"},"messages":[{"role":"user","content":"x"}]',
        '"unknown":{"?":"?"},"messages":[{"role":"user","content":"x"}]',
    ],
)
async def test_lone_surrogates_are_refused(url: str, http: aiohttp.ClientSession, bus: RigBus, spot: str) -> None:
    for lone in ("\\ud83d", "\\ude00", "a\\ud83db", "\\ud83d\\u0041"):
        body = "{" + spot.replace("?", lone) + "}"
        async with http.post(url + CHAT, data=body, headers={"Content-Type": "application/json"}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "invalid_json"
    assert not bus.asks


@pytest.mark.parametrize("text", ["a\u0000b", "\u202e", "é", "e\u0301", "\ufeffx", "👨‍👩‍👧", "Z" + "\u0337" * 500])
async def test_other_strange_text_passes_unchanged(
    url: str, http: aiohttp.ClientSession, bus: RigBus, text: str
) -> None:
    bus.script = answer([text])
    status, body = await ask(http, url, messages=[{"role": "user", "content": text}])
    assert status == 200 and body["choices"][0]["message"]["content"] == text
    assert bus.asks[0].given[0].body.messages[0].parts == [TextPart(text)]
    events = await stream(http, url)
    assert events[1]["choices"][0]["delta"]["content"] == text or events[0]["choices"][0]["delta"]["content"] == text


# ----------------------------------------------------------------------------------------------- failing and leaving


async def test_a_failure_before_the_first_event_has_its_status(client: openai.AsyncOpenAI, bus: RigBus) -> None:
    bus.failures = {0: OmniError("thinker was lost", status=503, code="stage_lost", retry_after_s=1, stage="thinker")}
    for streamed in (False, True):
        with pytest.raises(openai.InternalServerError) as raised:
            await client.chat.completions.create(model="omnibus", messages=USER, stream=streamed)
        assert raised.value.status_code == 503 and raised.value.code == "stage_lost"
        assert raised.value.response.headers["retry-after"] == "1"
    bus.failures = {0: OmniError("too long", status=400, code="context_length_exceeded", param="messages")}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="omnibus", messages=USER, stream=True)
    assert refused.value.code == "context_length_exceeded"
    assert not bus.open


@pytest.mark.parametrize("failure", [OmniError("the thinker died", code="stage_lost"), RuntimeError("secret")])
@pytest.mark.parametrize("extra", [{}, SPOKEN])
async def test_a_failure_in_mid_stream_is_told_in_band(
    url: str, http: aiohttp.ClientSession, client: openai.AsyncOpenAI, bus: RigBus, failure: Exception, extra: Any
) -> None:
    bus.failures = {3: failure}
    async with http.post(url + CHAT, json={"messages": USER, "stream": True, **extra}) as response:
        assert response.status == 200
        events = events_of(await response.text())
    assert "[DONE]" not in events
    *chunks, last = events
    assert set(last) == {"error"} and set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["code"] == ("stage_lost" if isinstance(failure, OmniError) else "internal_error")
    assert "secret" not in last["error"]["message"]
    assert chunks and all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    with pytest.raises(openai.APIError) as raised:
        async for _ in await client.chat.completions.create(model="omnibus", messages=USER, stream=True, **extra):
            pass
    assert raised.value.code == last["error"]["code"]
    async with http.get(url + "/metrics") as response:
        text = await response.text()
    assert 'omni_requests_total{outcome="error",route="/v1/chat/completions",status="200"} 2.0' in text
    bus.failures = {}
    assert (await ask(http, url))[0] == 200


async def test_comments_keep_a_waiting_stream_open(serve: Serve, bus: RigBus) -> None:
    url = await serve(Settings(keep_alive_s=0.02))
    for number, failure in ((0, None), (2, None), (0, OmniError("gone", code="stage_lost"))):
        bus.gates = {number: asyncio.Event()}
        bus.failures = {number: failure} if failure else {}
        reader, writer = await raw_request(url, raw_post(CHAT, {"messages": USER, "stream": True}))
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head and b"text/event-stream" in head
            for _ in range(3):
                await reader.readuntil(b": keep-alive\n\n")
            bus.gates[number].set()
            await reader.readuntil(b'data: {"error"' if failure else b"data: [DONE]\n\n")
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("body", [{}, SPOKEN, {"stream": True}, {"stream": True, **SPOKEN}])
@pytest.mark.parametrize("stuck_at", [0, 2])
async def test_a_client_that_leaves_cancels_its_request(
    serve: Serve, bus: RigBus, caplog: pytest.LogCaptureFixture, body: Any, stuck_at: int
) -> None:
    caplog.set_level("INFO")
    url = await serve(Settings(api_keys=("k",), cors_origins=("*",)))
    bus.gates = {stuck_at: asyncio.Event()}
    data = raw_post(CHAT, {"messages": USER, **body}).replace(b"Host: x", b"Host: x\r\nAuthorization: Bearer k")
    _, writer = await raw_request(url, data)
    await bus.until(lambda b: len(b.open) == 1 and b.events_given == stuck_at)
    writer.close()
    await bus.until(lambda b: b.cancelled == 1 and not b.open)
    lines = [r for r in caplog.records if r.name != "asyncio"]
    assert len(lines) == 1 and lines[0].levelname == "INFO" and not lines[0].exc_info
    assert " 499 abort " in lines[0].getMessage()
    assert bus.completed == 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_the_queue_never_starts(serve: Serve, bus: RigBus, streamed: bool) -> None:
    url = await serve()
    bus.admit = asyncio.Event()
    _, writer = await raw_request(url, raw_post(CHAT, {"messages": USER, "stream": streamed}))
    await bus.until(lambda b: len(b.asks) == 1)
    writer.close()
    await bus.until(lambda b: b.left_queue == 1)
    assert not bus.open and not bus.events_given


async def test_a_runaway_answer_ends_with_its_client(serve: Serve, bus: RigBus) -> None:
    def endless(asked: Any) -> Any:
        while True:
            yield from answer(["babble "])(asked)

    bus.script = endless
    url = await serve()
    reader, writer = await raw_request(url, raw_post(CHAT, {"messages": USER, "stream": True, **SPOKEN}))
    await asyncio.wait_for(reader.readuntil(b"babble"), 5)
    writer.close()
    await bus.until(lambda b: b.cancelled == 1 and not b.open)


async def test_a_client_that_does_not_read_holds_up_nobody(
    serve: Serve, bus: RigBus, http: aiohttp.ClientSession
) -> None:
    url = await serve()
    bus.script = answer("x" * 100_000 for _ in range(1000))
    _, slow = await raw_request(url, raw_post(CHAT, {"messages": USER, "stream": True}))
    await bus.until(lambda b: b.events_given > 3)
    bus.script = answer()
    for _ in range(20):
        assert (await ask(http, url))[0] == 200
    # 100 MB were there to be written; what the socket's buffers do not hold was not asked for.
    assert bus.events_given < 900 and len(bus.open) == 1
    slow.close()
    await bus.until(lambda b: b.cancelled == 1)


async def test_concurrent_answers_do_not_mix(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    def echo(asked: Any) -> Any:
        return answer(list(asked.given[0].body.messages[0].parts[0].text))(asked)

    bus.script = echo
    questions = [f"question {number}" for number in range(16)]

    async def one(question: str) -> str:
        events = await stream(http, url, messages=[{"role": "user", "content": question}], **SPOKEN)
        return "".join(e["choices"][0]["delta"].get("audio", {}).get("transcript", "") for e in events[:-1])

    assert await asyncio.gather(*map(one, questions)) == questions
