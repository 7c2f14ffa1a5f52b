"""Voices through real gateways and the real bus: what was uploaded to one of them is what a stage of another hears."""

import asyncio
import base64
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import soundfile

from support.http import gateway
from support.rig import fake, running

RATE = 24_000
VOICES = "/v1/audio/voices"


def sample(hz: float, seconds: float = 2.0) -> tuple[bytes, np.ndarray]:
    """A file, and as 16-bit numbers what comes back for it."""
    wave = 0.1 * np.sin(2 * np.pi * hz * np.arange(int(seconds * RATE)) / RATE)
    file = io.BytesIO()
    soundfile.write(file, wave - 0.75, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue(), np.rint((wave + 0.25) * 32767)


def heard(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<i2").astype(float)


async def upload(session: aiohttp.ClientSession, url: str, name: str, data: bytes) -> None:
    form = aiohttp.FormData({"name": name, "consent": "yes"})
    form.add_field("audio_sample", io.BytesIO(data), filename="x.wav", content_type="audio/wav")
    async with session.post(url + VOICES, data=form) as response:
        assert response.status == 200, await response.text()


async def say(session: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, bytes]:
    body = {"input": "hi", "response_format": "pcm", **body}
    async with session.post(f"{url}/v1/audio/speech", json=body) as response:
        return response.status, await response.read()


async def test_what_one_gateway_took_another_speaks_with(tmp_path: Path) -> None:
    """The longest sample crosses the bus in one piece; the folder outlives its gateways."""
    folder = tmp_path / "voices"
    flags = ("--voices", str(folder))
    short, short_back = sample(300)
    long, long_back = sample(500, 30.0)
    async with running(fake("parrot")) as rig, aiohttp.ClientSession() as session:
        async with gateway(rig, *flags) as one, gateway(rig, *flags) as two:
            await upload(session, one, "Short", short)
            await upload(session, two, "Long", long)
            for url in (one, two):
                for voice, back in (("short", short_back), ("LONG", long_back)):
                    status, data = await say(session, url, voice=voice)
                    assert status == 200, data
                    assert np.abs(heard(data) - back).max() <= 2
                given = {"ref_audio": {"data": base64.b64encode(short).decode()}}
                status, data = await say(session, url, **given)
                assert status == 200 and np.abs(heard(data) - short_back).max() <= 1
            items = [{"input": "a", "voice": name} for name in ("short", "long", "nobody") * 4]
            async with session.post(
                f"{two}/v1/audio/speech/batch", json={"items": items, "response_format": "pcm"}
            ) as r:
                results = (await r.json())["results"]
            for result, back in zip(results, (short_back, long_back, None) * 4, strict=True):
                if back is None:
                    assert result["error"]["param"] == "voice"
                else:
                    assert np.abs(heard(base64.b64decode(result["audio_data"])) - back).max() <= 2
            async with session.delete(f"{two}{VOICES}/short") as response:
                assert response.status == 200
            assert (await say(session, one, voice="short"))[0] == 400
            for name in [name for name in rig.processes if name.startswith("gateway")]:
                rig.kill(name)
                await rig.wait(name)
        async with gateway(rig, *flags) as three:
            async with session.get(three + VOICES) as response:
                listed = await response.json()
            assert [voice["id"] for voice in listed["voices"]] == ["Long"] and listed["voices"][0]["models"] == [
                "parrot"
            ]
            assert (await say(session, three, voice="long"))[0] == 200
        await rig.idle()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_a_gateway_keeps_voices_in_the_users_data_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    async with running(fake("parrot")) as rig, gateway(rig) as url, aiohttp.ClientSession() as session:
        await upload(session, url, "Zoe", sample(300)[0])
    assert [path for path in os.listdir(tmp_path / "omnibus" / "voices") if path.endswith(".zip")]


async def test_clients_that_leave_a_batch_leave_nothing_behind() -> None:
    long, _ = sample(300, 20.0)
    async with running(fake("parrot")) as rig, gateway(rig) as url, aiohttp.ClientSession() as session:
        reference = {"data": base64.b64encode(long).decode()}
        body = {"items": [{"input": "a"}] * 32, "ref_audio": reference, "response_format": "pcm"}

        async def answer() -> dict[str, Any]:
            data, headers = io.BytesIO(json.dumps(body).encode()), {"Content-Type": "application/json"}
            async with session.post(f"{url}/v1/audio/speech/batch", data=data, headers=headers) as response:
                answered: dict[str, Any] = await response.json()
                return answered

        for wait_s in (0.0, 0.05, 0.2, 0.5):
            task = asyncio.create_task(answer())
            await asyncio.wait({task}, timeout=wait_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await rig.idle()
        assert (await answer())["succeeded"] == 32
        await rig.idle()
