"""Media over HTTP: what the library says of the same picture, through gateway, bus and stages."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from PIL import Image as Pictures
from tokenizers import Tokenizer

from parity.library import ASKED, TOKENS, Library
from parity.test_omni_server import served
from support.http import gateway

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"


def data_url(pixels: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    Pictures.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def test_a_picture_in_a_message(checkpoints: Path, models: Path) -> None:
    asked = ASKED["image"]
    expected = Library("qwen3_omni", checkpoints / "qwen3_omni_tiny").say(asked)
    words = Tokenizer.from_file(str(models / "qwen3_omni_tiny" / "processor" / "tokenizer.json"))
    content = [
        {"type": "image_url", "image_url": {"url": data_url(asked.images[0])}},
        {"type": "text", "text": asked.parts[1].text},
    ]
    body = {
        "messages": [{"role": "system", "content": "You are good."}, {"role": "user", "content": content}],
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16", "voice": "ethan"},
        "temperature": 0,
        "max_tokens": TOKENS,
        "sampling_params_list": [{}, {}, {"temperature": 0, "max_tokens": 40}],
    }
    async with served("qwen3_omni") as rig, gateway(rig) as url, aiohttp.ClientSession() as http:
        async with http.post(url + CHAT, json=body) as response:
            answer = json.loads(await response.text())
            assert response.status == 200, answer
        audio = answer["choices"][0]["message"]["audio"]
        assert audio["transcript"] == words.decode(expected.ids)
        samples = np.frombuffer(base64.b64decode(audio["data"]), "<i2")
        assert len(samples) == len(expected.samples)
        assert np.abs(samples / 32767 - expected.samples.clip(-1, 1)).max() < 1e-3
        body["messages"][1]["content"][0]["image_url"]["url"] = "data:image/png;base64,AAAA"  # type: ignore[index]
        async with http.post(url + CHAT, json=body) as response:
            error = json.loads(await response.text())["error"]
            assert response.status == 400
            assert (error["code"], error["param"]) == ("invalid_image", "messages[1].content[0].image_url.url")
        await rig.idle()
