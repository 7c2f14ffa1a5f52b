"""Uploading, listing and deleting voices over HTTP, and speaking with what was uploaded."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import pytest_asyncio

from omni_common.frames import Audio
from omni_gateway import voice_store
from omni_gateway.context import Settings
from unit.gateway.cloner import cloner, pitch, sound_file
from unit.gateway.conftest import Serve, raw_request
from unit.gateway.rig_bus import RATE, RigBus

VOICES = "/v1/audio/voices"
SPEECH = "/v1/audio/speech"
CONSENT = "recorded 2026-12-04"


@pytest.fixture
def bus(bus: RigBus) -> RigBus:
    bus.pipelines["cloner"] = cloner()
    return bus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "voices"


@pytest_asyncio.fixture
async def url(serve: Serve, folder: Path) -> str:
    return await serve(Settings(voices=folder))


def form(
    sample: bytes | None = b"", kind: str = "audio/wav", filename: str = "zoe.wav", **fields: str | None
) -> aiohttp.FormData:
    data = aiohttp.FormData(default_to_multipart=True)
    if sample is not None:
        data.add_field("audio_sample", io.BytesIO(sample or sound_file()), filename=filename, content_type=kind)
    for name, value in ({"name": "Zoe", "consent": CONSENT} | fields).items():
        if value is not None:
            data.add_field(name, value)
    return data


async def upload(http: aiohttp.ClientSession, url: str, **fields: Any) -> tuple[int, Any]:
    async with http.post(url + VOICES, data=form(**fields)) as response:
        return response.status, await response.json()


async def kept(http: aiohttp.ClientSession, url: str, **fields: Any) -> dict[str, Any]:
    status, answer = await upload(http, url, **fields)
    assert status == 200, answer
    return answer


async def listed(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with http.get(url + VOICES) as response:
        assert response.status == 200
        return await response.json()


async def delete(http: aiohttp.ClientSession, url: str, name: str) -> tuple[int, Any]:
    async with http.delete(f"{url}{VOICES}/{name}") as response:
        return response.status, await response.json()


async def say(http: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, bytes]:
    async with http.post(url + SPEECH, json={"input": "Hello there", "model": "cloner", **body}) as response:
        return response.status, await response.read()


async def test_a_voice_is_uploaded_listed_spoken_with_and_deleted(
    http: aiohttp.ClientSession, url: str, bus: RigBus
) -> None:
    sample = sound_file(2.0, hz=500, rate=44_100, channels=2)
    answer = await kept(http, url, sample=sample, ref_text="It hums.", speaker_description="a hum")
    created = answer["voice"].pop("created_at")
    assert type(created) is int and created > 1_700_000_000
    about = {
        "name": "Zoe", "consent": CONSENT, "file_size": len(sample), "mime_type": "audio/wav",
        "ref_text": "It hums.", "speaker_description": "a hum",
    }  # fmt: skip
    assert answer == {"success": True, "voice": about}

    listing = await listed(http, url)
    [uploaded] = listing["uploaded_voices"]
    assert uploaded == about | {"created_at": created, "embedding_source": "audio", "embedding_dim": None}
    assert listing["voices"][-1] == {"id": "Zoe", "name": "Zoe", "models": ["cloner"]}

    for voice in ("Zoe", "zOE", {"id": "zoe"}):
        assert (await say(http, url, voice=voice))[0] == 200
        sound, text = bus.asks[-1].given
        assert (sound.body, sound.start, sound.end, sound.last) == (Audio(RATE), 0, 1, False)
        assert (text.modality, text.start, text.end, text.last) == ("text", 1, 2, True)
        samples = sound.arrays["samples"]
        assert samples.dtype == np.float32 and len(samples) == pytest.approx(2 * RATE, abs=2)
        assert pitch(samples) == pytest.approx(500, abs=1) and np.abs(samples).max() == pytest.approx(0.3, abs=0.01)
        assert bus.asks[-1].params["talker"]["ref_text"] == "It hums."
    assert (await say(http, url, voice="zoe", ref_text="Other words.", task_type="Base"))[0] == 200
    assert bus.asks[-1].params["talker"]["ref_text"] == "Other words."

    assert await delete(http, url, "ZOE") == (200, {"success": True, "message": 'The voice "ZOE" is deleted.'})
    status, answer = await delete(http, url, "zoe")
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "voice_not_found", "name")
    assert (await listed(http, url))["uploaded_voices"] == []
    asked = len(bus.asks)
    status, data = await say(http, url, voice="Zoe")
    assert (status, json.loads(data)["error"]["param"], len(bus.asks)) == (400, "voice", asked)


async def test_openai_python_speaks_with_an_upload(http: aiohttp.ClientSession, url: str, bus: RigBus) -> None:
    await kept(http, url, name="My own voice 😀")
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as sdk:
        voice = {"id": "my own voice 😀"}
        answer = await sdk.audio.speech.create(model="mimic", input="hi", voice=voice, response_format="wav")
    assert answer.content.startswith(b"RIFF") and len(bus.asks[0].given) == 2


async def test_a_second_upload_of_a_name_takes_its_place(
    http: aiohttp.ClientSession, url: str, bus: RigBus, folder: Path
) -> None:
    await kept(http, url, sample=sound_file(hz=300), ref_text="Old.")
    await kept(http, url, name="ZOE", sample=sound_file(hz=700))
    [uploaded] = (await listed(http, url))["uploaded_voices"]
    assert uploaded["name"] == "ZOE" and "ref_text" not in uploaded and "speaker_description" not in uploaded
    assert (await say(http, url, voice="zoe"))[0] == 200
    assert pitch(bus.asks[0].given[0].arrays["samples"]) == pytest.approx(700, abs=1)
    assert bus.asks[0].params["talker"]["ref_text"] == ""
    assert len(list(folder.glob("*.zip"))) == 1


async def test_every_gateway_of_the_folder_sees_an_upload(
    http: aiohttp.ClientSession, url: str, serve: Serve, folder: Path
) -> None:
    other = await serve(Settings(voices=folder))
    assert (await listed(http, other))["uploaded_voices"] == []
    await kept(http, url)
    assert [v["name"] for v in (await listed(http, other))["uploaded_voices"]] == ["Zoe"]
    assert (await say(http, other, voice="zoe"))[0] == 200
    assert (await delete(http, other, "zoe"))[0] == 200
    assert (await say(http, url, voice="zoe"))[0] == 400


@pytest.mark.parametrize(
    ("form_", "subtype", "rate", "kind"),
    [
        ("WAV", "PCM_U8", 8_000, "audio/wav"),
        ("WAV", "PCM_24", 48_000, "audio/x-wav"),
        ("WAV", "PCM_32", 96_000, "audio/wav; charset=binary"),
        ("WAV", "FLOAT", 16_000, "AUDIO/WAV"),
        ("FLAC", "PCM_16", 44_100, "audio/flac"),
        ("OGG", "VORBIS", 22_050, "audio/ogg"),
        ("MP3", None, 24_000, "audio/mpeg"),
        ("WAV", None, 24_000, "application/octet-stream"),
    ],
)
async def test_every_kind_of_sample(
    http: aiohttp.ClientSession, url: str, bus: RigBus, form_: str, subtype: str | None, rate: int, kind: str
) -> None:
    """B087, B089."""
    sample = sound_file(2.0, 440, rate, form=form_, subtype=subtype)
    answer = await kept(http, url, sample=sample, kind=kind)
    assert answer["voice"]["mime_type"] == kind.partition(";")[0].lower()
    assert (await say(http, url, voice="zoe"))[0] == 200
    samples = bus.asks[0].given[0].arrays["samples"]
    assert len(samples) / RATE == pytest.approx(2.0, abs=0.1)
    assert pitch(samples) == pytest.approx(440, abs=1)
    assert np.abs(samples[2000:-2000]).max() == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("seconds", [1.0, 29.9999, 30.0])
@pytest.mark.parametrize("rate", [11_025, 24_000, 44_100])
async def test_samples_of_every_allowed_length_can_be_spoken_with(
    http: aiohttp.ClientSession, url: str, bus: RigBus, seconds: float, rate: int
) -> None:
    await kept(http, url, sample=sound_file(seconds, rate=rate))
    assert (await say(http, url, voice="zoe"))[0] == 200
    assert len(bus.asks[0].given[0].arrays["samples"]) / RATE == pytest.approx(seconds, abs=0.01)


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"name": None}, "name", "missing_required_parameter"),
        ({"name": ""}, "name", "missing_required_parameter"),
        ({"name": " \t "}, "name", "missing_required_parameter"),
        ({"name": "x" * 101}, "name", "string_above_max_length"),
        ({"name": "../../etc/x"}, "name", "invalid_value"),
        ({"name": "a/b"}, "name", "invalid_value"),
        ({"name": "..\\x"}, "name", "invalid_value"),
        ({"name": "a\0b"}, "name", "invalid_value"),
        ({"name": "a\nb"}, "name", "invalid_value"),
        ({"name": "."}, "name", "invalid_value"),
        ({"name": ".."}, "name", "invalid_value"),
        ({"name": "Ann"}, "name", "voice_exists"),
        ({"name": "ALLOY"}, "name", "voice_exists"),
        ({"name": "Michael"}, "name", "voice_exists"),
        ({"name": "verse"}, "name", "voice_exists"),
        ({"name": "Default"}, "name", "voice_exists"),
        ({"consent": None}, "consent", "missing_required_parameter"),
        ({"consent": "  "}, "consent", "missing_required_parameter"),
        ({"consent": "x" * 501}, "consent", "string_above_max_length"),
        ({"ref_text": LONG}, "ref_text", "string_above_max_length"),
        ({"speaker_description": LONG}, "speaker_description", "string_above_max_length"),
        ({"speaker_embedding": "[0.1, 0.2]"}, "speaker_embedding", "unsupported_parameter"),
        ({"speaker_embedding": "[0.1]", "sample": None}, "speaker_embedding", "unsupported_parameter"),
        ({"sample": None}, "audio_sample", "missing_required_parameter"),
        ({"kind": "image/png"}, "audio_sample", "invalid_value"),
        ({"kind": "video/mp4"}, "audio_sample", "invalid_value"),
        ({"kind": "audio/midi"}, "audio_sample", "invalid_value"),
        ({"sample": b"not a sound at all"}, "audio_sample", "invalid_audio"),
        ({"sample": sound_file()[:-2000]}, "audio_sample", "invalid_audio"),
        ({"sample": sound_file(0.9)}, "audio_sample", "audio_too_short"),
        ({"sample": sound_file(30.1)}, "audio_sample", "audio_too_long"),
        ({"sample": sound_file(600, rate=8000, form="FLAC")}, "audio_sample", "audio_too_long"),
    ],
)
async def test_refusals_name_the_field_and_keep_nothing(
    http: aiohttp.ClientSession, url: str, folder: Path, fields: dict[str, Any], param: str, code: str
) -> None:
    status, answer = await upload(http, url, **fields)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code), answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert not folder.exists()


async def test_other_bodies_than_a_small_form_are_refused(http: aiohttp.ClientSession, url: str, folder: Path) -> None:
    status, answer = await upload(http, url, sample=b"\0" * (10 * 1024 * 1024 + 1))
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (413, "audio_sample", "audio_too_large")
    async with http.post(url + VOICES, json={"name": "zoe"}) as response:
        assert response.status == 415
    twice = form()
    twice.add_field("audio_sample", io.BytesIO(sound_file()), filename="b.wav", content_type="audio/wav")
    async with http.post(url + VOICES, data=twice) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "audio_sample")
    for method, path in (("PUT", VOICES), ("GET", VOICES + "/zoe"), ("DELETE", VOICES)):
        async with http.request(method, url + path) as response:
            assert response.status == 405
    assert not folder.exists()


@pytest.mark.parametrize(
    "filename", ["../../../../tmp/evil.wav", "/tmp/evil.wav", "..\\x.wav", "x" * 300, "CON", "", "😀.wav"]
)
async def test_a_files_name_is_never_used(
    http: aiohttp.ClientSession, url: str, folder: Path, tmp_path: Path, filename: str
) -> None:
    """B080."""
    await kept(http, url, filename=filename)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parent for path in found} == {folder} and len(found) == 2, "the voice, and the folder's lock"
    assert not Path("/tmp/evil.wav").exists()


@pytest.mark.parametrize(
    "name", ["..%2f..%2fetc%2fpasswd", "%2e%2e", "a%00b", "%ff%fe", "x" * 2000, "%F0%9F%98%80", "ann"]
)
async def test_deleting_what_is_no_upload_is_the_same_404(
    http: aiohttp.ClientSession, url: str, folder: Path, name: str
) -> None:
    """B080: no oracle, and a voice of a model stays."""
    await kept(http, url)
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await raw_request(
        url, f"DELETE {VOICES}/{name} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()
    )
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b'"voice_not_found"' in answer or name == "%2e%2e"
    assert len(list(folder.glob("*.zip"))) == 1


async def test_where_nothing_clones_nothing_is_taken_but_all_is_listed(
    http: aiohttp.ClientSession, url: str, bus: RigBus
) -> None:
    await kept(http, url)
    del bus.pipelines["cloner"]
    status, answer = await upload(http, url, name="Other")
    assert (status, answer["error"]["code"]) == (400, "unsupported_endpoint")
    assert "clone" in answer["error"]["message"]
    listing = await listed(http, url)
    assert [v["name"] for v in listing["uploaded_voices"]] == ["Zoe"]
    assert "Zoe" not in {v["id"] for v in listing["voices"]}
    status, data = await say(http, url, model="speech", voice="zoe")
    assert (status, json.loads(data)["error"]["param"]) == (400, "voice")
    assert (await delete(http, url, "zoe"))[0] == 200


async def test_a_server_without_a_folder_takes_none(http: aiohttp.ClientSession, serve: Serve) -> None:
    url = await serve(Settings())
    status, answer = await upload(http, url)
    assert (status, answer["error"]["code"]) == (400, "unsupported_endpoint")
    assert (await listed(http, url))["uploaded_voices"] == []
    assert (await delete(http, url, "zoe"))[0] == 404


async def test_all_of_it_is_behind_the_key(http: aiohttp.ClientSession, serve: Serve, folder: Path) -> None:
    url = await serve(Settings(api_keys=("secret",), voices=folder))
    for method, path, data in (("POST", VOICES, form()), ("DELETE", VOICES + "/zoe", None), ("GET", VOICES, None)):
        async with http.request(method, url + path, data=data) as response:
            assert response.status == 401
    assert not folder.exists()
    async with http.post(url + VOICES, data=form(), headers={"Authorization": "Bearer secret"}) as response:
        assert response.status == 200


async def test_the_most_voices(http: aiohttp.ClientSession, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice_store, "MOST", 1)
    await kept(http, url)
    status, answer = await upload(http, url, name="other")
    assert (status, answer["error"]["code"]) == (400, "too_many_voices")


async def test_a_folder_that_cannot_be_written_is_the_servers_fault(
    http: aiohttp.ClientSession, serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    url = await serve(Settings(voices=tmp_path / "file" / "voices"))
    status, answer = await upload(http, url)
    assert status == 500 and str(tmp_path) not in json.dumps(answer)
    assert (await listed(http, url))["uploaded_voices"] == []


async def test_many_uploads_of_one_name_leave_one_whole_voice(
    http: aiohttp.ClientSession, url: str, bus: RigBus, folder: Path
) -> None:
    pitches = [300.0 + 50 * i for i in range(8)]
    answers = await asyncio.gather(
        *(upload(http, url, sample=sound_file(1.0, hz), ref_text=f"{hz:g}") for hz in pitches)
    )
    assert [status for status, _ in answers] == [200] * 8
    [uploaded] = (await listed(http, url))["uploaded_voices"]
    assert (await say(http, url, voice="zoe"))[0] == 200
    heard = pitch(bus.asks[0].given[0].arrays["samples"])
    assert heard == pytest.approx(float(uploaded["ref_text"]), abs=1)
    assert bus.asks[0].params["talker"]["ref_text"] == uploaded["ref_text"]
    assert len(list(folder.glob("*.zip"))) == 1 and not list(folder.glob("*.unfinished"))
