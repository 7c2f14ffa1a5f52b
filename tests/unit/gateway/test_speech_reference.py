"""Speech in the voice of a sound that comes with the request: what enters the pipeline, and what is refused."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import numpy as np
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from omni_common.errors import OmniError
from omni_common.frames import Audio, Text
from omni_common.params import Generation
from omni_gateway.media import decode
from omni_gateway.media.fetch import Fetcher
from omni_gateway.speech_ask import build_job
from omni_gateway.speech_reference import References, Source
from omni_gateway.speech_schema import SpeechRequest
from omni_gateway.voice_store import VoiceStore
from unit.gateway.cloner import base64_of, cloner, data_url, hum, pitch, sound_file
from unit.gateway.conftest import raw_post, raw_request
from unit.gateway.rig_bus import RATE, RigBus

SPEECH = "/v1/audio/speech"
SAMPLE = sound_file()
URL = data_url(SAMPLE)
HOME = Fetcher(allowed=lambda address: address.is_loopback)


@pytest.fixture
def bus(bus: RigBus) -> RigBus:
    bus.pipelines["cloner"] = cloner()
    return bus


async def say(http: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, bytes]:
    file = io.BytesIO(msgspec.json.encode({"input": "Hello there", "model": "cloner", **body}))
    async with http.post(url + SPEECH, data=file, headers={"Content-Type": "application/json"}) as response:
        return response.status, await response.read()


async def refused(
    http: aiohttp.ClientSession, url: str, bus: RigBus, param: str, code: str, status: int = 400, **body: Any
) -> str:
    got, data = await say(http, url, **body)
    assert got == status, data
    error = json.loads(data)["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert not bus.asks
    return str(error["message"])


# ------------------------------------------------------------------------------------------------------- what goes in


@pytest.mark.parametrize(
    "body",
    [
        {"ref_audio": URL, "ref_text": "A hum."},
        {"ref_audio": {"data": base64_of(SAMPLE), "format": "wav"}, "ref_text": "A hum."},
        {"ref_audio": {"data": base64_of(SAMPLE)}, "ref_text": "A hum.", "voice": "default"},
        {"references": [{"audio_path": URL, "text": "A hum."}]},
        {"references": [{"audio": URL, "text": "A hum."}], "task_type": "Base", "voice": {"id": "Default"}},
        {"ref_audio": URL, "ref_text": "A hum.", "x_vector_only_mode": False, "speaker_embedding": None},
    ],
)
async def test_the_sound_goes_before_the_text_and_its_words_are_a_parameter(
    http: aiohttp.ClientSession, url: str, bus: RigBus, body: dict[str, Any]
) -> None:
    status, data = await say(http, url, **body)
    assert status == 200, data
    [ask] = bus.asks
    sound, text = ask.given
    assert (sound.modality, sound.body, sound.start, sound.end, sound.last) == ("audio", Audio(RATE, 0), 0, 1, False)
    assert (text.modality, text.body, text.start, text.end, text.last) == ("text", Text("Hello there"), 1, 2, True)
    samples = sound.arrays["samples"]
    assert samples.dtype == np.float32
    assert np.abs(samples - hum()[:, 0]).max() < 2**-14, "as it was sent"
    assert ask.params["talker"]["ref_text"] == "A hum."
    assert ask.params["talker"]["voice"] == "ann", "the pipeline's usual one"


async def test_without_a_sound_the_text_is_the_only_piece(http: aiohttp.ClientSession, url: str, bus: RigBus) -> None:
    for voice in ("Bob", "default", None):
        assert (await say(http, url, voice=voice))[0] == 200
    for ask, meant in zip(bus.asks, ("bob", "ann", "ann"), strict=True):
        [text] = ask.given
        assert (text.body, text.start, text.end, text.last) == (Text("Hello there"), 0, 1, True)
        assert ask.params["talker"]["voice"] == meant and ask.params["talker"]["ref_text"] == ""


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("channels", [1, 2, 6])
async def test_any_rate_and_channels_become_mono_at_the_pipelines_rate(
    http: aiohttp.ClientSession, url: str, bus: RigBus, rate: int, channels: int
) -> None:
    """B089."""
    bus.pipelines["cloner"] = cloner(audio_rate=22_050)
    assert (await say(http, url, ref_audio=data_url(sound_file(1.5, 440, rate, channels))))[0] == 200
    given = bus.asks[0].given[0]
    samples = given.arrays["samples"]
    assert given.body == Audio(22_050)
    assert len(samples) == pytest.approx(1.5 * 22_050, abs=2)
    assert pitch(samples, 22_050) == pytest.approx(440, abs=1)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
async def test_any_depth(http: aiohttp.ClientSession, url: str, bus: RigBus, subtype: str) -> None:
    """B087."""
    assert (await say(http, url, ref_audio=data_url(sound_file(subtype=subtype))))[0] == 200
    samples = bus.asks[0].given[0].arrays["samples"]
    assert np.abs(samples - hum()[:, 0]).max() < (2**-6 if subtype == "PCM_U8" else 2**-14)


async def test_many_at_once_each_have_their_own_sound(http: aiohttp.ClientSession, url: str, bus: RigBus) -> None:
    """B052."""
    pitches = [200.0 + 40 * i for i in range(8)]
    bodies = [{"input": f"{hz:g}", "ref_audio": data_url(sound_file(1.0, hz)), "ref_text": f"{hz:g}"} for hz in pitches]
    assert [status for status, _ in await asyncio.gather(*(say(http, url, **body) for body in bodies))] == [200] * 8
    for ask in bus.asks:
        sound, text = ask.given
        assert pitch(sound.arrays["samples"]) == pytest.approx(float(text.body.text), abs=1)
        assert ask.params["talker"]["ref_text"] == text.body.text


async def test_max_new_tokens_is_the_talkers_limit(http: aiohttp.ClientSession, url: str, bus: RigBus) -> None:
    for given, limit in ((None, 64), (1, 1), (500, 500)):
        assert (await say(http, url, max_new_tokens=given))[0] == 200
        assert bus.asks[-1].params["talker"]["max_tokens"] == limit
        assert bus.asks[-1].params["code2wav"] == {"voice": ""}


async def test_the_talkers_parameters_have_the_field() -> None:
    assert Generation().ref_text == ""


async def test_openai_python_clones(url: str, bus: RigBus) -> None:
    """The library insists on a voice."""
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as sdk:
        more = {"ref_audio": URL, "ref_text": "A hum."}
        answer = await sdk.audio.speech.create(
            model="mimic", input="hi", voice="default", response_format="wav", extra_body=more
        )
    assert answer.content.startswith(b"RIFF")
    assert [given.modality for given in bus.asks[0].given] == ["audio", "text"]


# ---------------------------------------------------------------------------------------------------- what is refused

#: Refused before the sound is looked at.
BROKEN = data_url(b"no sound")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"ref_audio": URL, "voice": "ann"}, "voice", "invalid_value"),
        ({"ref_audio": URL, "voice": "Alloy"}, "voice", "invalid_value"),
        ({"ref_audio": URL, "voice": {"id": "bob"}}, "voice", "invalid_value"),
        ({"references": [{"audio": URL}], "voice": "ann"}, "voice", "invalid_value"),
        ({"ref_audio": BROKEN, "voice": "nobody"}, "voice", "invalid_value"),
        ({"ref_audio": BROKEN, "voice": ""}, "voice", "invalid_value"),
        ({"ref_text": "Words."}, "ref_text", "invalid_value"),
        ({"ref_text": "Words.", "voice": "ann"}, "ref_text", "invalid_value"),
        ({"ref_audio": BROKEN, "ref_text": "x" * 4097}, "ref_text", "invalid_value"),
        ({"ref_audio": BROKEN, "ref_text": 5}, "ref_text", "invalid_type"),
        ({"ref_audio": 5}, "ref_audio", "invalid_type"),
        ({"ref_audio": [URL]}, "ref_audio", "invalid_type"),
        ({"ref_audio": {}}, "ref_audio.data", "missing_required_parameter"),
        ({"ref_audio": {"data": 5}}, "ref_audio.data", "invalid_type"),
        ({"ref_audio": {"data": ""}}, "ref_audio.data", "invalid_audio"),
        ({"ref_audio": {"data": "?"}}, "ref_audio.data", "invalid_base64"),
        ({"ref_audio": {"data": base64_of(b"no sound")}}, "ref_audio.data", "invalid_audio"),
        ({"ref_audio": ""}, "ref_audio", "invalid_url"),
        ({"ref_audio": "zoe.wav"}, "ref_audio", "invalid_url"),
        ({"ref_audio": "/etc/passwd"}, "ref_audio", "invalid_url"),
        ({"ref_audio": "file:///etc/passwd"}, "ref_audio", "invalid_url"),
        ({"ref_audio": "FILE:/etc/passwd"}, "ref_audio", "invalid_url"),
        ({"ref_audio": "ftp://example.com/a.wav"}, "ref_audio", "invalid_url"),
        ({"ref_audio": "gopher://example.com/"}, "ref_audio", "invalid_url"),
        ({"ref_audio": "http://user:word@example.com/"}, "ref_audio", "invalid_url"),
        ({"ref_audio": "http://" + "x" * 9000}, "ref_audio", "invalid_url"),
        ({"ref_audio": "data:audio/wav,RIFF"}, "ref_audio", "invalid_url"),
        ({"ref_audio": "data:audio/wav;base64,?"}, "ref_audio", "invalid_base64"),
        ({"ref_audio": BROKEN}, "ref_audio", "invalid_audio"),
        ({"ref_audio": data_url(SAMPLE[:-1000])}, "ref_audio", "invalid_audio"),
        ({"ref_audio": data_url(sound_file(0.99))}, "ref_audio", "audio_too_short"),
        ({"ref_audio": data_url(sound_file(30.01))}, "ref_audio", "audio_too_long"),
        ({"ref_audio": data_url(sound_file(120, rate=8000, form="FLAC"))}, "ref_audio", "audio_too_long"),
        ({"references": []}, "references", "invalid_type"),
        ({"references": [{"audio": URL}, {"audio": URL}]}, "references", "array_above_max_length"),
        ({"references": URL}, "references", "invalid_type"),
        ({"references": [{}]}, "references[0].audio_path", "missing_required_parameter"),
        ({"references": [{"text": "Words."}]}, "references[0].audio_path", "missing_required_parameter"),
        ({"references": [{"audio": URL, "audio_path": URL}]}, "references[0].audio", "invalid_value"),
        ({"references": [{"audio_path": "/etc/passwd"}]}, "references[0].audio_path", "invalid_url"),
        ({"references": [{"audio": "../x.wav"}]}, "references[0].audio", "invalid_url"),
        ({"references": [{"audio": 5}]}, "references[0].audio", "invalid_type"),
        ({"references": [{"audio": URL}], "ref_audio": URL}, "references", "invalid_value"),
        ({"references": [{"audio": URL}], "ref_text": "Words."}, "references", "invalid_value"),
        ({"ref_audio": URL, "ref_audio_2": URL}, "ref_audio_2", "unsupported_parameter"),
        ({"speaker_embedding": [0.5, 0.25]}, "speaker_embedding", "unsupported_parameter"),
        ({"ref_audio": URL, "x_vector_only_mode": True}, "x_vector_only_mode", "unsupported_parameter"),
        ({"task_type": "Base"}, "task_type", "invalid_value"),
        ({"task_type": "Base", "voice": "ann"}, "task_type", "invalid_value"),
        ({"task_type": "CustomVoice", "ref_audio": BROKEN}, "task_type", "invalid_value"),
        ({"task_type": "VoiceDesign"}, "task_type", "unsupported_parameter"),
        ({"task_type": "base", "ref_audio": BROKEN}, "task_type", "unsupported_parameter"),
        ({"task_type": 5}, "task_type", "invalid_type"),
        ({"max_new_tokens": 0}, "max_new_tokens", "invalid_type"),
        ({"max_new_tokens": 2**31}, "max_new_tokens", "invalid_type"),
        ({"max_new_tokens": "5"}, "max_new_tokens", "invalid_type"),
        ({"max_new_tokens": 1.5}, "max_new_tokens", "invalid_type"),
    ],
)
async def test_refusals_name_the_field_and_ask_the_bus_nothing(
    http: aiohttp.ClientSession, url: str, bus: RigBus, body: dict[str, Any], param: str, code: str
) -> None:
    message = await refused(http, url, bus, param, code, **body)
    assert "root:" not in message and len(message) < 500


async def test_a_file_that_is_too_large(http: aiohttp.ClientSession, url: str, bus: RigBus) -> None:
    large = bytes((4 << 20) + 1)
    for body, param in (
        ({"ref_audio": data_url(large)}, "ref_audio"),
        ({"ref_audio": {"data": base64_of(large)}}, "ref_audio.data"),
    ):
        await refused(http, url, bus, param, "audio_too_large", 413, **body)


@pytest.mark.parametrize("seconds", [1.0, 30.0])
@pytest.mark.parametrize("rate", [11_025, 24_000, 44_100])
async def test_the_shortest_and_the_longest(
    http: aiohttp.ClientSession, url: str, bus: RigBus, seconds: float, rate: int
) -> None:
    assert (await say(http, url, ref_audio=data_url(sound_file(seconds, rate=rate))))[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        {"ref_audio": BROKEN},
        {"ref_text": "Words."},
        {"references": [{"audio": BROKEN}]},
        {"ref_audio_2": BROKEN},
        {"speaker_embedding": [0.5]},
        {"x_vector_only_mode": True},
        {"task_type": "Base"},
        {"task_type": "VoiceDesign"},
        {"max_new_tokens": 5},
    ],
)
async def test_a_pipeline_that_clones_nothing_says_so(
    http: aiohttp.ClientSession, url: str, bus: RigBus, body: dict[str, Any]
) -> None:
    [param] = body
    await refused(http, url, bus, param, "unsupported_parameter", model="speech", **body)


async def test_what_asks_for_nothing_is_fine_everywhere(http: aiohttp.ClientSession, url: str, bus: RigBus) -> None:
    names = ("ref_audio", "ref_text", "references", "speaker_embedding", "x_vector_only_mode", "max_new_tokens")
    for model in ("speech", "cloner"):
        body = dict.fromkeys(names) | {"x_vector_only_mode": False, "task_type": "CustomVoice", "language": "English"}
        assert (await say(http, url, model=model, voice="alloy", **body))[0] == 200


# ------------------------------------------------------------------------------------------------------------ fetched


@dataclass
class Site:
    """Serves sounds at this machine."""

    base: str = ""
    paths: list[str] = field(default_factory=list)
    #: Answers wait for it.
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)


@pytest_asyncio.fixture
async def site(no_task_left: None) -> AsyncIterator[Site]:
    site = Site()
    site.gate.set()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        site.paths.append(request.path)
        site.asked.set()
        try:
            await site.gate.wait()
        except asyncio.CancelledError:
            site.left.set()
            raise
        if request.path == "/inside":
            return web.Response(status=302, headers={"Location": site.base.replace("127.0.0.1", "127.0.0.2")})
        hz = float(request.path.removeprefix("/"))
        return web.Response(body=sound_file(1.0, hz), content_type="text/html")

    async with AsyncExitStack() as stack:
        server = web.Server(handle, access_log=None, handler_cancellation=True)
        runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        site.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield site


@pytest.mark.parametrize("name", ["ref_audio", "audio_path", "audio"])
async def test_a_sound_at_an_address(site: Site, name: str) -> None:
    address = f"{site.base}/330"
    body = {"ref_audio": address} if name == "ref_audio" else {"references": [{name: address}]}
    request = msgspec.convert({"input": "hi", **body}, SpeechRequest)
    job = await build_job(request, cloner(), References(VoiceStore(None), HOME))
    assert pitch(job.ask.given[0].arrays["samples"]) == pytest.approx(330, abs=1)
    assert site.paths == ["/330"]


async def test_nothing_inside_is_asked(http: aiohttp.ClientSession, url: str, bus: RigBus, site: Site) -> None:
    """B079, as the server runs."""
    port = site.base.rpartition(":")[2]
    hosts = (
        "127.0.0.1", "2130706433", "127.1", "0.0.0.0", "localhost", "[::1]", "[::ffff:127.0.0.1]",
        "[::ffff:169.254.169.254]", "169.254.169.254", "user@127.0.0.1",
    )  # fmt: skip
    for host in hosts:
        for name in ("ref_audio", "audio_path", "audio"):
            address = f"http://{host}:{port}/440"
            body = {"ref_audio": address} if name == "ref_audio" else {"references": [{name: address}]}
            status, data = await say(http, url, **body)
            error = json.loads(data)["error"]
            assert status == 400 and error["code"] in ("fetch_failed", "invalid_url"), error
            assert error["param"] == ("ref_audio" if name == "ref_audio" else f"references[0].{name}")
    assert not site.paths and not bus.asks


async def test_a_redirect_is_held_to_the_rule(site: Site) -> None:
    """B079."""
    only_home = Fetcher(allowed=lambda address: str(address) == "127.0.0.1")
    references = References(VoiceStore(None), only_home)
    with pytest.raises(OmniError) as raised:
        await references.samples(Source("ref_audio", url=f"{site.base}/inside"), cloner())
    assert (raised.value.code, raised.value.param) == ("fetch_failed", "ref_audio")
    assert site.paths == ["/inside"]


async def test_a_sound_that_several_share_is_read_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    real = decode._Job.run
    monkeypatch.setattr(decode._Job, "run", lambda job: decoded.append(1) or real(job))
    references = References(VoiceStore(None), HOME)
    asked = [Source("ref_audio", url=f"{site.base}/{hz}") for hz in (300, 400, 300, 300, 400)]
    found = await asyncio.gather(*(references.samples(source, cloner()) for source in asked))
    assert sorted(site.paths) == ["/300", "/400"] and len(decoded) == 2
    assert [round(pitch(samples)) for samples in found] == [300, 400, 300, 300, 400]
    other = await references.samples(asked[0], cloner(audio_rate=16_000))
    assert len(other) == pytest.approx(16_000, abs=2)


async def test_a_client_that_leaves_ends_the_fetch(
    url: str, bus: RigBus, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(References.__init__, "__defaults__", (HOME,))
    site.gate.clear()
    body = {"model": "cloner", "input": "hi", "ref_audio": f"{site.base}/440"}
    _, writer = await raw_request(url, raw_post(SPEECH, body))
    await asyncio.wait_for(site.asked.wait(), 5)
    writer.close()
    await writer.wait_closed()
    await asyncio.wait_for(site.left.wait(), 5)
    assert not bus.asks
