"""Batches of speech over a rig bus: results in order, defaults, failures of some, refusals of all, and leaving."""

import asyncio
import base64
import io
import json
import wave
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from omni_common.errors import OmniError
from omni_common.frames import Audio
from omni_gateway import endpoint, speech_batch
from omni_gateway.context import Settings
from omni_gateway.media.encode import CONTENT_TYPES, to_int16
from omni_gateway.speech_batch import SpeechBatch, merged
from omni_gateway.stream import Ask, Event
from unit.gateway.cloner import cloner, data_url, pitch, sound_file
from unit.gateway.conftest import Serve, raw_post, raw_request
from unit.gateway.rig_bus import RATE, WORD_SAMPLES, RigBus, event, spoken_text, tone

BATCH = "/v1/audio/speech/batch"
SPEECH = "/v1/audio/speech"


async def post(http: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, Any]:
    file = io.BytesIO(msgspec.json.encode(body))
    async with http.post(url + BATCH, data=file, headers={"Content-Type": "application/json"}) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


async def batch(http: aiohttp.ClientSession, url: str, *items: Any, **defaults: Any) -> list[dict[str, Any]]:
    """The results, whose order and counts are right."""
    items = tuple({"input": item} if isinstance(item, str) else item for item in items)
    status, answer = await post(http, url, {"items": items, **defaults})
    assert status == 200, answer
    assert set(answer) == {"id", "results", "total", "succeeded", "failed"}
    assert answer["id"].startswith("speech-batch-") and answer["total"] == len(items)
    results: list[dict[str, Any]] = answer["results"]
    assert [result["index"] for result in results] == list(range(len(items)))
    states = [result["status"] for result in results]
    assert (answer["succeeded"], answer["failed"]) == (states.count("success"), states.count("error"))
    for result in results:
        good = {"index", "status", "audio_data", "media_type", "usage"}
        assert set(result) == (good if result["status"] == "success" else {"index", "status", "error"})
    return results


def sound(result: dict[str, Any]) -> bytes:
    return base64.b64decode(result["audio_data"], validate=True)


def words(count: int) -> str:
    return " ".join(["word"] * count)


# ---------------------------------------------------------------------------------------------------------- the results


async def test_results_are_whole_files_in_the_order_of_the_items(
    http: aiohttp.ClientSession, url: str, bus: RigBus
) -> None:
    results = await batch(http, url, words(3), words(1), words(2), response_format="wav", voice="alloy")
    for result, count in zip(results, (3, 1, 2), strict=True):
        assert result["media_type"] == "audio/wav"
        data = sound(result)
        assert int.from_bytes(data[40:44], "little") == len(data) - 44, "it states its true length"
        with wave.open(io.BytesIO(data)) as reader:
            assert reader.readframes(reader.getnframes()) == to_int16(tone(count * WORD_SAMPLES)).tobytes()
        text = words(count)
        assert result["usage"] == {
            "input_tokens": len(text), "output_tokens": 2 * count, "total_tokens": len(text) + 2 * count,
            "input_token_details": {"text_tokens": len(text), "audio_tokens": 0},
        }  # fmt: skip
    assert bus.completed == 3 and not bus.open
    assert len({ask.seed for ask in bus.asks}) == 3


@pytest.mark.parametrize("fmt", CONTENT_TYPES)
async def test_every_format(http: aiohttp.ClientSession, url: str, fmt: str) -> None:
    [result] = await batch(http, url, {"input": words(4), "response_format": fmt})
    assert result["media_type"] == CONTENT_TYPES[fmt]
    if fmt in ("pcm", "pcm16"):
        assert sound(result) == to_int16(tone(4 * WORD_SAMPLES)).tobytes()


async def test_an_item_sounds_as_it_does_alone(http: aiohttp.ClientSession, url: str) -> None:
    item = {"input": words(5), "response_format": "pcm", "voice": "michael", "speed": 3.0, "seed": 7}
    async with http.post(url + SPEECH, json=item) as response:
        alone = await response.read()
    assert [sound(result) for result in await batch(http, url, item, item)] == [alone] * 2


async def test_items_finish_in_any_order(http: aiohttp.ClientSession, url: str, bus: RigBus) -> None:
    """All run at once; the first is the last to be ready."""
    bus.gates = {4: asyncio.Event()}
    task = asyncio.create_task(batch(http, url, words(5), words(1), words(2), response_format="pcm"))
    await bus.until(lambda b: b.completed == 2)
    assert len(bus.asks) == 3 and not task.done()
    bus.gates[4].set()
    assert [len(sound(result)) // 2 // WORD_SAMPLES for result in await task] == [5, 1, 2]


async def test_32_at_once_each_get_their_own_sound(http: aiohttp.ClientSession, url: str, bus: RigBus) -> None:
    """B052."""

    def script(ask: Ask) -> Iterator[Event]:
        hz = float(ask.given[0].body.text)
        yield event("audio", Audio(RATE), 0, RATE, arrays={"samples": tone(RATE, hz)}, last=True)

    bus.script = script
    pitches = [200.0 + 20 * i for i in range(32)]
    results = await batch(http, url, *(f"{hz:g}" for hz in pitches), response_format="pcm")
    for hz, result in zip(pitches, results, strict=True):
        assert pitch(np.frombuffer(sound(result), "<i2")) == pytest.approx(hz, abs=1)


# ------------------------------------------------------------------------------------------------------------- defaults


async def test_what_the_batch_says_holds_unless_an_item_says_otherwise(
    http: aiohttp.ClientSession, url: str, bus: RigBus
) -> None:
    items = (
        "one",
        {"input": "two", "voice": "alloy", "speed": 0.5, "response_format": "flac", "seed": 8},
        {"input": "three", "voice": None, "speed": None, "response_format": None, "seed": None, "model": None},
    )
    defaults = {"voice": "michael", "speed": 2.0, "response_format": "wav", "seed": 7, "model": "tts-1"}
    results = await batch(http, url, *items, **defaults)
    asked = {ask.given[0].body.text: ask for ask in bus.asks}
    for text, voice, speed, seed in (("one", "michael", 2, 7), ("two", "heart", 0.5, 8), ("three", "michael", 2, 7)):
        assert asked[text].params["talker"] == {"voice": voice, "speed": speed}
        assert asked[text].seed == seed and asked[text].pipeline.name == "speech"
    assert [result["media_type"] for result in results] == ["audio/wav", "audio/flac", "audio/wav"]


@pytest.mark.parametrize(
    ("item", "left"),
    [
        ({}, {"ref_audio": "https://a.b/c", "ref_text": "Theirs."}),
        ({"ref_text": "Mine."}, {"ref_audio": "https://a.b/c", "ref_text": "Mine."}),
        ({"ref_audio": "https://x.y/z"}, {"ref_audio": "https://x.y/z"}),
        ({"references": [{"audio": "https://x.y/z"}]}, {"references": [{"audio": "https://x.y/z"}]}),
        ({"voice": "ann"}, {"voice": "ann"}),
        ({"voice": "ann", "speed": 2.0}, {"voice": "ann", "speed": 2.0}),
    ],
)
def test_an_item_that_names_its_speaker_has_nothing_of_the_batchs(item: dict[str, Any], left: dict[str, Any]) -> None:
    body = {"items": [{"input": "hi", **item}], "ref_audio": "https://a.b/c", "ref_text": "Theirs.", "seed": 3}
    asked = msgspec.convert(body, SpeechBatch)
    given = {k: v for k, v in msgspec.to_builtins(merged(asked.items[0], asked)).items() if v is not None}
    given |= {"references": [{"audio": "https://x.y/z"}]} if "references" in given else {}
    assert given == {"input": "hi", "seed": 3} | left


async def test_one_reference_for_all(
    http: aiohttp.ClientSession, url: str, bus: RigBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is decoded once, and lies in memory once."""
    bus.pipelines["cloner"] = cloner()
    body = {"model": "cloner", "ref_audio": data_url(sound_file(1.0, 300)), "ref_text": "A hum."}
    own = {"input": "other", "ref_audio": data_url(sound_file(1.0, 700))}
    results = await batch(http, url, "one", own, "two", {"input": "named", "voice": "bob"}, **body)
    assert [result["status"] for result in results] == ["success"] * 4
    asked = {ask.given[-1].body.text: ask for ask in bus.asks}
    sounds = {text: ask.given[0].arrays.get("samples") for text, ask in asked.items()}
    assert sounds["one"] is sounds["two"] and sounds["named"] is None
    assert pitch(sounds["one"]) == pytest.approx(300, abs=1) and pitch(sounds["other"]) == pytest.approx(700, abs=1)
    texts = {text: ask.params["talker"]["ref_text"] for text, ask in asked.items()}
    assert texts == {"one": "A hum.", "two": "A hum.", "other": "", "named": ""}


# ------------------------------------------------------------------------------------------------------- some that fail


async def test_what_is_wrong_with_an_item_is_its_own_error(http: aiohttp.ClientSession, url: str, bus: RigBus) -> None:
    def script(ask: Ask) -> Iterator[Event]:
        text = ask.given[0].body.text
        if text == "silent":
            return iter([event("audio", None, 0, 0, last=True)])
        return spoken_text(ask)

    bus.script = script
    wrong = [
        ({"input": ""}, "input", "invalid_value"),
        ({"input": "x" * 401}, "input", "string_above_max_length"),
        ({"input": "silent"}, "input", "nothing_to_speak"),
        ({"input": "a", "voice": "nobody"}, "voice", "invalid_value"),
        ({"input": "a", "response_format": "m4a"}, "response_format", "invalid_value"),
        ({"input": "a", "model": "gpt-9"}, "model", "model_not_found"),
        ({"input": "a", "model": "embedded"}, "model", "invalid_value"),
        ({"input": "a", "ref_audio": "https://example.com/a.wav"}, "ref_audio", "unsupported_parameter"),
        ({"input": "a", "task_type": "VoiceDesign"}, "task_type", "unsupported_parameter"),
        ({"input": "a", "max_new_tokens": 5}, "max_new_tokens", "unsupported_parameter"),
    ]
    results = await batch(http, url, "good", *(item for item, _, _ in wrong), "good too", response_format="pcm")
    assert results[0]["status"] == results[-1]["status"] == "success"
    for result, (_, param, code) in zip(results[1:-1], wrong, strict=True):
        error = result["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    async with http.get(url + "/metrics") as response:
        assert f'omni_requests_total{{outcome="error",route="{BATCH}",status="200"}} 1.0' in await response.text()


async def test_overload_and_failures_on_the_way_are_errors_of_their_items(
    http: aiohttp.ClientSession, url: str, bus: RigBus
) -> None:
    real = bus.submit
    refusals = [
        OmniError("full", status=429, code="queue_full", retry_after_s=1.0),
        OmniError("talker is gone", status=503, code="stage_lost"),
        RuntimeError("secret path /x"),
    ]

    async def submit(ask: Ask) -> Any:
        if ask.given[0].body.text == "refused":
            raise refusals.pop(0)
        bus.failures = {1: OmniError("talker died", code="stage_lost")} if ask.given[0].body.text == "a b c" else {}
        return await real(ask)

    bus.submit = submit  # type: ignore[method-assign]
    results = await batch(http, url, "refused", "fine", "refused", "a b c", "refused", "fine")
    told = [(r["error"]["code"], r["error"]["type"]) if "error" in r else None for r in results]
    assert told == [
        ("queue_full", "rate_limit_error"), None, ("stage_lost", "server_error"), ("stage_lost", "server_error"),
        ("internal_error", "server_error"), None,
    ]  # fmt: skip
    assert "secret" not in json.dumps(results)
    assert not bus.open


async def test_all_may_fail(http: aiohttp.ClientSession, url: str, bus: RigBus) -> None:
    bus.refusal = OmniError("full", status=429, code="queue_full", retry_after_s=1.0)
    results = await batch(http, url, "a", "b")
    assert [result["error"]["code"] for result in results] == ["queue_full"] * 2


async def test_more_sound_than_an_answer_holds(
    http: aiohttp.ClientSession, url: str, bus: RigBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech_batch, "_SOUND_S", 1.0)
    results = await batch(http, url, words(2), words(30), response_format="pcm")
    assert results[0]["status"] == "success" and results[1]["error"]["code"] == "audio_too_long"
    assert bus.cancelled == 1 and not bus.open
    assert (await batch(http, url, words(10)))[0]["status"] == "success"


# --------------------------------------------------------------------------------------------------- refused as a whole

ITEM = {"input": "hi"}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "items", "missing_required_parameter"),
        ({"items": None}, "items", "invalid_type"),
        ({"items": []}, "items", "invalid_type"),
        ({"items": "hi"}, "items", "invalid_type"),
        ({"items": ["hi"]}, "items[0]", "invalid_type"),
        ({"items": [None]}, "items[0]", "invalid_type"),
        ({"items": [ITEM] * 33}, "items", "array_above_max_length"),
        ({"items": [ITEM, {}]}, "items[1].input", "missing_required_parameter"),
        ({"items": [ITEM, {"input": None}]}, "items[1].input", "invalid_type"),
        ({"items": [ITEM, {"input": 5}]}, "items[1].input", "invalid_type"),
        ({"items": [{**ITEM, "speed": 9}]}, "items[0].speed", "invalid_type"),
        ({"items": [{**ITEM, "voice": 9}]}, "items[0].voice", "invalid_type"),
        ({"items": [{**ITEM, "references": []}]}, "items[0].references", "invalid_type"),
        ({"items": [ITEM], "speed": "fast"}, "speed", "invalid_type"),
        ({"items": [ITEM], "voice": {}}, "voice.id", "missing_required_parameter"),
        ({"items": [ITEM], "model": 5}, "model", "invalid_type"),
        ({"items": [ITEM], "model": "embedded"}, "model", "invalid_value"),
        ({"items": [ITEM], "stream": True}, "stream", "unsupported_parameter"),
        ({"items": [ITEM], "stream": "yes"}, "stream", "unsupported_parameter"),
        ({"items": [ITEM], "stream_format": "sse"}, "stream_format", "unsupported_parameter"),
        ({"items": [ITEM], "stream_format": "audio"}, "stream_format", "unsupported_parameter"),
        ({"items": [ITEM, {**ITEM, "stream": True}]}, "items[1].stream", "unsupported_parameter"),
        ({"items": [ITEM, {**ITEM, "stream_format": "audio"}]}, "items[1].stream_format", "unsupported_parameter"),
    ],
)
async def test_a_body_that_is_no_batch(
    http: aiohttp.ClientSession, url: str, bus: RigBus, body: Any, param: str, code: str
) -> None:
    status, answer = await post(http, url, body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code), answer
    assert not bus.asks


async def test_other_bodies(http: aiohttp.ClientSession, url: str, serve: Serve, bus: RigBus) -> None:
    status, answer = await post(http, url, {"items": [ITEM], "model": "gpt-9"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert (await post(http, url, [ITEM]))[0] == 400
    assert (await post(http, url, {"items": [{**ITEM, "x": [0] * 250_001}]}))[0] == 413
    small = await serve(Settings(max_body_bytes=1000))
    assert (await post(http, small, {"items": [{"input": "x" * 1000}]}))[0] == 413
    async with http.get(url + BATCH) as response:
        assert response.status == 405
    locked = await serve(Settings(api_keys=("secret",)))
    assert (await post(http, locked, {"items": [ITEM]}))[0] == 401
    assert not bus.asks
    assert (await post(http, url, {"items": [{**ITEM, "stream": False}], "stream": False}))[0] == 200


# -------------------------------------------------------------------------------------------------------------- leaving


@pytest.mark.parametrize("when", ["queued", "placed", "speaking"])
async def test_a_client_that_leaves_cancels_all_items(bus: RigBus, url: str, when: str) -> None:
    if when == "queued":
        bus.admit = asyncio.Event()
    else:
        bus.gates = {0 if when == "placed" else 2: asyncio.Event()}
    body = {"items": [{"input": words(4)}] * 5 + [{"input": "x" * 401}]}
    _, writer = await raw_request(url, raw_post(BATCH, body))
    await bus.until(lambda b: len(b.asks) == 5 and b.events_given == (10 if when == "speaking" else 0))
    if when != "queued":
        await bus.until(lambda b: len(b.open) == 5)
    writer.close()
    await writer.wait_closed()
    await bus.until(lambda b: (b.left_queue if when == "queued" else b.cancelled) == 5)
    assert not bus.open and bus.completed == 0


async def test_items_that_never_end_are_let_go(
    http: aiohttp.ClientSession, url: str, bus: RigBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bus says so at the deadline; this is for one that says nothing."""
    monkeypatch.setattr(endpoint, "_LAST_WORDS_S", 0.05)
    limits = msgspec.structs.replace(bus.pipelines["speech"].limits, total_s=0.05)
    bus.pipelines["speech"] = msgspec.structs.replace(bus.pipelines["speech"], limits=limits)
    bus.gates = {1: asyncio.Event()}
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await post(http, url, {"items": [{"input": words(3)}, {"input": words(3)}]})
    await bus.until(lambda b: b.cancelled == 2)
    assert not bus.open
