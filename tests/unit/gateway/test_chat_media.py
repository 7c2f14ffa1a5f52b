"""Chat with images, videos and sound: what enters the pipeline, and what is refused before anything does."""

import base64
import io
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from PIL import Image as Pictures

from omni_common.errors import OmniError
from omni_common.frames import Audio, AudioPart, Image, ImagePart, Prompt, TextPart, Video, VideoPart
from omni_common.pipeline import Pipeline, Task
from omni_gateway import chat_ask, endpoint, media_input
from omni_gateway.audio_store import AudioStore
from omni_gateway.chat_schema import ChatRequest
from omni_gateway.media.fetch import Fetcher
from omni_gateway.media_input import Media, given_input
from omni_gateway.stream import Given
from unit.gateway.conftest import Serve, raw_post, raw_request
from unit.gateway.film import film, sound_file
from unit.gateway.rig_bus import RigBus

CHAT = "/v1/chat/completions"
OMNI = {
    "name": "omni",
    "stages": {
        "preprocessor": {"engine": "processor"},
        "thinker": {"engine": "transformers", "inputs": ["preprocessor"]},
    },
    "tasks": {
        "chat": {
            "input": dict.fromkeys(("text", "audio", "image", "video"), "preprocessor"),
            "output": {"text": "thinker"},
        }
    },
    "limits": {
        "audio_s": 5, "audio_mib": 1, "image_mib": 1, "image_source_pixels": 1 << 20, "image_pixels": 1 << 20,
        "video_s": 5, "video_mib": 1, "media": 6, "media_mib": 1,
    },
}  # fmt: skip


def omni(**limits: Any) -> Pipeline:
    return msgspec.convert({**OMNI, "limits": {**OMNI["limits"], **limits}}, Pipeline)  # type: ignore[dict-item]


@pytest.fixture
def bus() -> RigBus:
    bus = RigBus()
    bus.pipelines["omni"] = omni()
    return bus


def picture(width: int = 6, height: int = 4, colour: Any = "red") -> bytes:
    file = io.BytesIO()
    Pictures.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes, kind: str = "application/octet-stream") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def shown(data: bytes, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data, "image/png"), **more}}


def filmed(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}


def heard(seconds: float = 0.5) -> dict[str, Any]:
    data = base64.b64encode(sound_file(seconds)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "mp4"}}


def asking(*content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "omni", "messages": [{"role": "user", "content": list(content)}], **more}


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, Any]:
    file = io.BytesIO(msgspec.json.encode(body))
    async with http.post(url + CHAT, data=file, headers={"Content-Type": "application/json"}) as response:
        return response.status, await response.json()


async def refused(
    http: aiohttp.ClientSession, url: str, bus: RigBus, body: Any, param: str, code: str, status: int = 400
) -> str:
    got, answer = await post(http, url, body)
    assert got == status, answer
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, code), answer
    assert not bus.asks
    return str(answer["error"]["message"])


# ----------------------------------------------------------------------------------------------------- what goes in


async def test_a_conversation_of_everything(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    say = {"type": "text", "text": "And?"}
    messages = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [shown(picture()), filmed(film()), heard(), say]},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": [
            {"type": "audio_url", "audio_url": {"url": data_url(sound_file(0.3))}},
            {"type": "video_url", "video_url": data_url(film(times=(0, 0.5), width=32, height=32))},
            {"type": "image_url", "image_url": data_url(picture(9, 5, "blue"))},
        ]},
    ]  # fmt: skip
    status, answer = await post(http, url, {"model": "omni", "messages": messages})
    assert status == 200, answer
    [asked] = bus.asks
    prompt, *media = asked.given
    assert isinstance(prompt.body, Prompt)
    assert [message.parts for message in prompt.body.messages] == [
        [TextPart("Look.")],
        [ImagePart(0), VideoPart(0), AudioPart(0), TextPart("And?")],
        [TextPart("Red.")],
        [AudioPart(1), VideoPart(1), ImagePart(1)],
    ]
    assert [(given.start, given.end, given.last) for given in asked.given] == [
        (at, at + 1, at == 6) for at in range(7)
    ], "they share one edge"
    assert [given.modality for given in media] == ["image", "image", "audio", "audio", "video", "video"]
    assert [given.body for given in media] == [
        Image(0), Image(1), Audio(16_000, 0), Audio(16_000, 1), Video(0, 2.0, True), Video(1, 2.0, True),
    ]  # fmt: skip
    pixels = [given.arrays["pixels"] for given in media[:2]]
    assert [array.shape for array in pixels] == [(4, 6, 3), (5, 9, 3)]
    assert (pixels[0] == (255, 0, 0)).all() and (pixels[1] == (0, 0, 255)).all()
    samples = [given.arrays["samples"] for given in media[2:4]]
    assert [len(array) / 16_000 for array in samples] == pytest.approx([0.5, 0.3], abs=0.1)
    frames = [given.arrays["frames"] for given in media[4:]]
    assert [array.shape for array in frames] == [(4, 48, 64, 3), (2, 32, 32, 3)]
    assert all(array.dtype == np.uint8 for array in pixels + frames)
    heard_s = sum(map(len, samples)) / 16_000
    assert answer["usage"]["prompt_tokens_details"]["audio_tokens"] == pytest.approx(heard_s * 10, abs=1)


@pytest.mark.parametrize(
    ("asked", "sounds"),
    [
        ({"use_audio_in_video": True}, True),
        ({"mm_processor_kwargs": {"use_audio_in_video": True}}, True),
        ({"mm_processor_kwargs": {"use_audio_in_video": False}, "use_audio_in_video": True}, True),
        ({"mm_processor_kwargs": {"use_audio_in_video": True}, "use_audio_in_video": False}, False),
        ({"mm_processor_kwargs": {}, "media_io_kwargs": {}}, False),
        ({"mm_processor_kwargs": None, "use_audio_in_video": None, "media_io_kwargs": None}, False),
    ],
)
async def test_the_sound_of_videos(
    url: str, http: aiohttp.ClientSession, bus: RigBus, asked: dict[str, Any], sounds: bool
) -> None:
    body = asking(heard(0.3), filmed(film(sound="aac")), heard(0.2), **asked)
    status, answer = await post(http, url, body)
    assert status == 200, answer
    prompt, *media = bus.asks[0].given
    assert isinstance(prompt.body, Prompt)
    assert prompt.body.messages[0].parts == (
        [AudioPart(0), VideoPart(0, 1), AudioPart(2)] if sounds else [AudioPart(0), VideoPart(0), AudioPart(1)]
    )
    audios = [given.arrays["samples"] for given in media if isinstance(given.body, Audio)]
    seconds = [0.3, 2.0, 0.2] if sounds else [0.3, 0.2]
    assert [len(samples) / 16_000 for samples in audios] == pytest.approx(seconds, abs=0.1)


async def test_low_detail_and_large_images(bus: RigBus, serve: Serve, http: aiohttp.ClientSession) -> None:
    bus.pipelines["omni"] = omni(image_pixels=600_000, media_mib=10)
    url = await serve()
    large = picture(1000, 800)
    details = [shown(large, detail=detail) for detail in ("auto", "high", "low")]
    status, answer = await post(http, url, asking(*details))
    assert status == 200, answer
    shapes = [given.arrays["pixels"].shape for given in bus.asks[0].given[1:]]
    assert shapes == [(692, 866, 3), (692, 866, 3), (457, 572, 3)]


def test_a_video_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = np.arange(7 * 4 * 6 * 3, dtype=np.uint8).reshape(7, 4, 6, 3)
    for nbytes, lengths in ((1, [1] * 7), (3 * 72, [3, 3, 1]), (7 * 72, [7]), (1 << 20, [7])):
        monkeypatch.setattr(media_input, "_PIECE_BYTES", nbytes)
        media = Media(videos=[(frames, 1.5), (frames[:1], 2.0)])
        _, *pieces = given_input(omni().tasks["chat"], Prompt([]), media)
        first = [piece for piece in pieces if isinstance(piece.body, Video) and piece.body.index == 0]
        assert [len(piece.arrays["frames"]) for piece in first] == lengths
        assert [piece.body.end_of_video for piece in first] == [False] * (len(lengths) - 1) + [True]  # type: ignore[union-attr]
        assert (np.concatenate([piece.arrays["frames"] for piece in first]) == frames).all()
        assert pieces[-1].body == Video(1, 2.0, True) and pieces[-1].last
        assert [piece.start for piece in pieces] == list(range(1, len(pieces) + 1))


def test_a_long_audio_goes_in_pieces() -> None:
    samples = np.zeros(16_000 * 31, np.float32)
    _, *pieces = given_input(omni().tasks["chat"], Prompt([]), Media(audios=[samples, samples[:5]]))
    assert [(piece.body.index, len(piece.arrays["samples"])) for piece in pieces] == [  # type: ignore[union-attr]
        (0, 480_000), (0, 16_000), (1, 5),
    ]  # fmt: skip


def test_edges_are_numbered_each_for_itself() -> None:
    """A recogniser's counts samples, whatever the others carry."""
    task = msgspec.convert(
        {"input": {"text": "a", "audio": "b", "image": "c", "video": "c"}, "output": {"text": "a"}}, Task
    )
    media = Media(
        images=[np.zeros((2, 2, 3), np.uint8)] * 2,
        audios=[np.zeros(5, np.float32), np.zeros(7, np.float32)],
        videos=[(np.zeros((1, 2, 2, 3), np.uint8), 1.0)],
    )

    def places(given: list[Given]) -> list[tuple[str, int, int, bool]]:
        return [(each.modality, each.start, each.end, each.last) for each in given]

    assert places(given_input(task, Prompt([]), media)) == [
        ("text", 0, 1, True),
        ("audio", 0, 5, False), ("audio", 5, 12, True),
        ("image", 0, 1, False), ("image", 1, 2, False), ("video", 2, 3, True),
    ]  # fmt: skip
    assert places(given_input(task, Prompt([]), Media())) == [("text", 0, 1, True)]


# ------------------------------------------------------------------------------------------------------------ refused

WHERE = "messages[0].content[0]"
BIG = "A" * (1 << 21)
REFUSED = {
    "no image": ({"type": "image_url"}, ".image_url", "missing_required_parameter"),
    "no video": ({"type": "video_url", "image_url": "x"}, ".video_url", "missing_required_parameter"),
    "no audio": ({"type": "audio_url", "audio_url": None}, ".audio_url", "missing_required_parameter"),
    "no url": ({"type": "image_url", "image_url": {}}, ".image_url.url", "missing_required_parameter"),
    "a number": ({"type": "image_url", "image_url": 5}, ".image_url", "invalid_type"),
    "a detail": (shown(picture(), detail="most"), ".image_url.detail", "invalid_value"),
    "a path": ({"type": "image_url", "image_url": "/etc/passwd"}, ".image_url", "invalid_url"),
    "a file": ({"type": "audio_url", "audio_url": {"url": "file:///a"}}, ".audio_url.url", "invalid_url"),
    "an address inside": ({"type": "video_url", "video_url": {"url": "http://10.0.0.1/"}}, ".video_url.url",
                          "fetch_failed"),
    "not base64": ({"type": "image_url", "image_url": "data:image/png;base64,?"}, ".image_url", "invalid_base64"),
    "no picture": (shown(b"words and more words"), ".image_url.url", "invalid_image"),
    "half a picture": (shown(picture(64, 64)[:-40]), ".image_url.url", "invalid_image"),
    "a bomb": (shown(picture(2000, 2000)), ".image_url.url", "image_too_large"),
    "no film": (filmed(picture()), ".video_url.url", "invalid_video"),
    "sound only": (filmed(sound_file()), ".video_url.url", "invalid_video"),
    "a long film": (filmed(film(times=[number / 2 for number in range(12)])), ".video_url.url", "video_too_long"),
    "a picture as sound": ({"type": "audio_url", "audio_url": data_url(picture())}, ".audio_url", "invalid_audio"),
    "long sound": ({"type": "audio_url", "audio_url": data_url(sound_file(5.5))}, ".audio_url", "audio_too_long"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_refused(url: str, http: aiohttp.ClientSession, bus: RigBus, name: str) -> None:
    part, field, code = REFUSED[name]
    await refused(http, url, bus, asking(part), WHERE + field, code)


@pytest.mark.parametrize(
    ("part", "field", "code"),
    [
        ({"type": "image_url", "image_url": "data:;base64," + BIG}, ".image_url", "image_too_large"),
        ({"type": "video_url", "video_url": {"url": "data:;base64," + BIG}}, ".video_url.url", "video_too_large"),
        ({"type": "audio_url", "audio_url": "data:;base64," + BIG}, ".audio_url", "audio_too_large"),
        ({"type": "input_audio", "input_audio": {"data": BIG}}, ".input_audio.data", "audio_too_large"),
    ],
)
async def test_too_many_bytes(
    url: str, http: aiohttp.ClientSession, bus: RigBus, part: Any, field: str, code: str, monkeypatch: Any
) -> None:
    """They are counted, not decoded."""
    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("it was decoded"))
    await refused(http, url, bus, asking(part), WHERE + field, code, 413)


async def test_everything_together_is_limited(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    many = [shown(picture())] * 7
    await refused(http, url, bus, asking(*many), "messages[0].content[6].image_url.url", "too_many_media")
    large = [shown(picture(400, 400))] * 3
    await refused(http, url, bus, asking(*large), "messages[0].content[2].image_url.url", "media_too_large")
    films = [filmed(film(width=240, height=240))] * 2
    await refused(http, url, bus, asking(*films), "messages[0].content[1].video_url.url", "media_too_large")
    sounds = [filmed(film(sound="aac")), heard(1.5), filmed(film(sound="aac"))]
    body = asking(*sounds, use_audio_in_video=True)
    await refused(http, url, bus, body, "messages[0].content[2].video_url.url", "audio_too_long")


async def test_a_video_without_the_sound_that_is_asked_for(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    body = asking(filmed(film()), use_audio_in_video=True)
    text = await refused(http, url, bus, body, WHERE + ".video_url.url", "invalid_video")
    assert "no sound" in text


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"use_audio_in_video": "yes"}, "use_audio_in_video", "invalid_type"),
        ({"mm_processor_kwargs": {"use_audio_in_video": 1}}, "mm_processor_kwargs.use_audio_in_video", "invalid_type"),
        ({"mm_processor_kwargs": {"fps": 5}}, "mm_processor_kwargs", "invalid_value"),
        ({"media_io_kwargs": {"video": {"num_frames": 5}}}, "media_io_kwargs", "unsupported_parameter"),
    ],
)
async def test_refused_options(
    url: str, http: aiohttp.ClientSession, bus: RigBus, more: Any, param: str, code: str
) -> None:
    await refused(http, url, bus, asking({"type": "text", "text": "hi"}, **more), param, code)


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
async def test_media_are_the_users(url: str, http: aiohttp.ClientSession, bus: RigBus, role: str) -> None:
    messages = [{"role": role, "content": [shown(picture())]}, {"role": "user", "content": "hi"}]
    await refused(http, url, bus, {"model": "omni", "messages": messages}, WHERE, "invalid_value")


@pytest.mark.parametrize("missing", ["audio", "image", "video"])
async def test_what_a_pipeline_does_not_take(url: str, http: aiohttp.ClientSession, bus: RigBus, missing: str) -> None:
    del bus.pipelines["omni"].tasks["chat"].input[missing]  # type: ignore[arg-type]
    parts = {"audio": [heard(), {"type": "audio_url"}], "image": [shown(picture())], "video": [filmed(film())]}
    for part in parts[missing]:
        text = await refused(http, url, bus, asking(part), WHERE, "invalid_value")
        # What it does take is said.
        for kind, names in (("audio", "input_audio, audio_url"), ("image", "image_url"), ("video", "video_url")):
            assert (names in text.partition(", not ")[0]) == (kind != missing)
    if missing == "audio":
        body = asking(filmed(film(sound="aac")), use_audio_in_video=True)
        await refused(http, url, bus, body, "use_audio_in_video", "invalid_value")


@pytest.mark.parametrize("kind", ["image_url", "video_url", "file"])
async def test_a_pipeline_of_words_and_sound(url: str, http: aiohttp.ClientSession, bus: RigBus, kind: str) -> None:
    body = {**asking({"type": kind, kind: {"url": "http://127.0.0.1/"}}), "model": "omnibus"}
    text = await refused(http, url, bus, body, WHERE, "invalid_value")
    assert "takes text and input_audio, audio_url" in text


# ------------------------------------------------------------------------------------------------------------ fetched


@pytest_asyncio.fixture
async def site(no_task_left: None) -> AsyncIterator[tuple[str, list[str]]]:
    """Serves media at this machine; the base URL, and the paths that were asked for."""
    paths: list[str] = []
    files = {"/image": picture(), "/video": film(), "/audio": sound_file(), "/large": bytes(1 << 21)}

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        paths.append(request.path)
        return web.Response(body=files[request.path])

    async with AsyncExitStack() as stack:
        runner = web.ServerRunner(web.Server(handle, access_log=None), shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", paths


async def test_media_at_addresses(site: tuple[str, list[str]]) -> None:
    base, paths = site
    fetcher = Fetcher(allowed=lambda address: address.is_loopback)

    async def build(*content: Any, **limits: Any) -> chat_ask.ChatJob:
        request = msgspec.convert(asking(*content), ChatRequest)
        return await chat_ask.build_job(request, omni(**limits), "openai", AudioStore(), "me", fetcher)

    parts = [{"type": f"{kind}_url", f"{kind}_url": {"url": f"{base}/{kind}"}} for kind in ("image", "audio", "video")]
    job = await build(*parts)
    assert [given.modality for given in job.ask.given] == ["text", "image", "audio", "video"]
    assert paths == ["/image", "/audio", "/video"] and job.audio_in

    with pytest.raises(OmniError) as raised:
        await build({"type": "image_url", "image_url": f"{base}/large"})
    assert (raised.value.code, raised.value.status) == ("image_too_large", 413)
    assert raised.value.param == WHERE + ".image_url"
    with pytest.raises(OmniError) as raised:
        await build(*[{"type": "image_url", "image_url": f"{base}/image"}] * 3, media=2)
    assert raised.value.code == "too_many_media" and paths[4:] == ["/image"] * 2


async def test_nothing_inside_is_asked(
    url: str, http: aiohttp.ClientSession, bus: RigBus, site: tuple[str, list[str]]
) -> None:
    """B079, as the server runs."""
    base, paths = site
    port = base.rpartition(":")[2]
    for kind in ("image", "video", "audio"):
        for host in ("127.0.0.1", "localhost", "2130706433", "[::ffff:127.0.0.1]"):
            part = {"type": f"{kind}_url", f"{kind}_url": {"url": f"http://{host}:{port}/{kind}"}}
            status, answer = await post(http, url, asking(part))
            assert status == 400 and answer["error"]["code"] in ("fetch_failed", "invalid_url")
            assert answer["error"]["param"] == f"{WHERE}.{kind}_url.url"
    assert not paths and not bus.asks


async def test_large_base64_is_decoded_beside_the_loop(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B049"""
    threads: list[int] = []
    decode, check = base64.b64decode, endpoint._check_values

    def noted(*args: Any, **options: Any) -> bytes:
        threads.append(threading.get_ident())
        return decode(*args, **options)

    def checked(body: bytes) -> None:
        threads.append(threading.get_ident())
        check(body)

    monkeypatch.setattr(base64, "b64decode", noted)
    monkeypatch.setattr(endpoint, "_check_values", checked)
    body = raw_post(CHAT, asking(shown(bytes(900 << 10))))
    reader, writer = await raw_request(url, body.replace(b"Host: x", b"Host: x\r\nConnection: close", 1))
    assert b"invalid_image" in await reader.read()
    writer.close()
    assert len(threads) == 2 and threading.get_ident() not in threads
