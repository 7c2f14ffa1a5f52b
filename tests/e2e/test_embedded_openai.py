"""Two major versions of openai-python do everything an application does, against the real pipeline."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.clients.instance import PATIENCE_S, Instance

pytestmark = pytest.mark.embedded

SESSION = Path(__file__).parent / "clients" / "openai_session.py"
#: Major version -> where it is installed; the tests' own environment has the newest.
VERSIONS = {"2": str(Path(sys.prefix) / "openai2"), "3": ""}


@pytest.fixture(scope="module", params=VERSIONS)
def told(request: pytest.FixtureRequest, instance: Instance, spoken_question: Path) -> dict[str, Any]:
    """What one version saw; see `clients/openai_session.py`."""
    done = subprocess.run(
        [sys.executable, str(SESSION), f"{instance.url}/v1", str(spoken_question)],
        env=os.environ | {"PYTHONPATH": VERSIONS[request.param]},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["version"].split(".")[0] == request.param
    return seen


@pytest.mark.parametrize("asked", ["text", "voice"])
def test_the_capital_of_france_in_text_and_in_sound(told: dict[str, Any], asked: str) -> None:
    whole, streamed = told[asked]["whole"], told[asked]["streamed"]
    for answer in (whole, streamed):
        assert "Paris" in answer["text"]
        assert "Paris" in answer["heard"]
    assert whole["text"] == streamed["text"]
    assert whole["content"] is None
    assert whole["finish"] == "stop" and streamed["finish"] == ["stop"]


@pytest.mark.parametrize("asked", ["text", "voice"])
def test_the_stream_has_the_samples_of_the_whole_answer(told: dict[str, Any], asked: str) -> None:
    """B001."""
    assert told[asked]["whole"]["pcm"] == told[asked]["streamed"]["pcm"]
    assert len(base64.b64decode(told[asked]["whole"]["pcm"])) > 24_000


def test_asked_by_voice_is_asked_by_text(told: dict[str, Any]) -> None:
    assert told["voice"]["whole"]["text"] == told["text"]["whole"]["text"]


def test_a_stream_is_one_answer_with_its_fields_in_order(told: dict[str, Any]) -> None:
    """B014, B015."""
    streamed, whole = told["text"]["streamed"], told["text"]["whole"]
    assert len(set(streamed["ids"])) == 1
    assert len(streamed["audio_ids"]) == 1
    assert streamed["order"][0] == "id" and streamed["order"][-1] == "expires_at"
    assert streamed["order"].count("expires_at") == 1
    assert streamed["usages"] == [whole["usage"]]
    details = whole["usage"]["completion_tokens_details"]
    assert details["audio_tokens"] > 0
    assert details["audio_tokens"] + details["text_tokens"] == whole["usage"]["completion_tokens"]
    assert told["voice"]["whole"]["usage"]["prompt_tokens_details"]["audio_tokens"] > 0


def test_a_spoken_answer_is_known_by_its_id_in_the_next_turn(told: dict[str, Any]) -> None:
    assert "Tokyo" in told["next"]


def test_speech_in_both_ways_of_reading_it(told: dict[str, Any]) -> None:
    """B030: read whole, and as it comes; the voice by name, and as an object."""
    speech = told["speech"]
    assert speech["same"] and speech["type"] == "audio/pcm" and speech["pieces"] > 1
    assert "train leaves" in speech["heard"] and "be there early" in speech["heard"]


def test_transcription_in_every_format(told: dict[str, Any]) -> None:
    forms = told["transcription"]
    question = "What is the capital of France?"
    assert forms["json"]["text"] == forms["text"].strip() == forms["verbose_json"]["text"] == question
    assert forms["verbose_json"]["segments"][0]["text"].strip() == question
    assert 1 < forms["verbose_json"]["duration"] < 4
    assert forms["srt"].startswith("1\n00:00:00,000 --> 00:00:0") and question in forms["srt"]
    assert forms["vtt"].startswith("WEBVTT\n\n") and question in forms["vtt"]
    assert forms["events"][-1]["type"] == "transcript.text.done" and forms["events"][-1]["text"] == question
    assert "".join(event["delta"] for event in forms["events"][:-1]) == question


def test_models_and_mistakes(told: dict[str, Any]) -> None:
    """B021: the class, the field and the code are what applications look at; a stream's mistake is no event in it."""
    assert {"embedded", "speech", "gpt-4o-audio-preview", "tts-1", "whisper-1"} <= set(told["models"])
    errors = {name: error[:4] for name, error in told["errors"].items()}
    assert errors == {
        "model": ["NotFoundError", 404, "model", "model_not_found"],
        "tools": ["BadRequestError", 400, "tools", "unsupported_parameter"],
        "voice": ["BadRequestError", 400, "voice", "invalid_value"],
        "stream": ["BadRequestError", 400, "temperature", "invalid_value"],
    }
    assert "heart" in told["errors"]["voice"][4]
