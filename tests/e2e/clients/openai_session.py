"""Everything that an application does with openai-python, told as JSON; `PYTHONPATH` chooses the version.

Usage: openai_session.py BASE_URL QUESTION.wav
"""

import base64
import io
import json
import sys
import wave
from pathlib import Path
from typing import Any

import openai

QUESTION = "What is the capital of France?"


def main(base_url: str, spoken: Path) -> dict[str, Any]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        heard = {"data": base64.b64encode(spoken.read_bytes()).decode(), "format": "wav"}
        by_voice = [{"type": "input_audio", "input_audio": heard}]
        told: dict[str, Any] = {"version": openai.__version__}
        told["text"] = exchange(client, QUESTION)
        told["voice"] = exchange(client, by_voice)
        told["next"] = whole(client, follow_up(told["text"]["whole"]["id"]))["text"]
        told["speech"] = speech(client)
        told["transcription"] = transcription(client, spoken)
        told["models"] = [model.id for model in client.models.list()]
        told["errors"] = errors(client)
    return told


def exchange(client: openai.OpenAI, content: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"whole": whole(client, messages), "streamed": streamed(client, messages)}


def follow_up(audio_id: str) -> list[dict[str, Any]]:
    """The next turn names the spoken answer by its id only."""
    return [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "audio": {"id": audio_id}},
        {"role": "user", "content": "And what is the capital of Japan?"},
    ]


def request(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": "gpt-4o-audio-preview",
        "messages": messages,
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "pcm16"},
        "temperature": 0,
        "seed": 7,
    }


def whole(client: openai.OpenAI, messages: list[dict[str, Any]]) -> dict[str, Any]:
    completion = client.chat.completions.create(**request(messages))
    [choice] = completion.choices
    audio = choice.message.audio
    pcm = base64.b64decode(audio.data)
    return {
        "id": audio.id,
        "text": audio.transcript,
        "content": choice.message.content,
        "expires_at": audio.expires_at,
        "finish": choice.finish_reason,
        "usage": completion.usage.model_dump(),
        "pcm": audio.data,
        "heard": transcript(client, pcm),
    }


def streamed(client: openai.OpenAI, messages: list[dict[str, Any]]) -> dict[str, Any]:
    stream = client.chat.completions.create(**request(messages), stream=True, stream_options={"include_usage": True})
    told: dict[str, Any] = {"ids": [], "audio_ids": [], "text": "", "finish": [], "usages": [], "order": []}
    pcm = b""
    for chunk in stream:
        told["ids"].append(chunk.id)
        if not chunk.choices:
            told["usages"].append(chunk.usage.model_dump())
            continue
        [choice] = chunk.choices
        if choice.finish_reason:
            told["finish"].append(choice.finish_reason)
        # Up to 2.x the library does not know the field and gives the plain dict.
        audio = choice.delta.model_dump(exclude_unset=True).get("audio") or {}
        if "id" in audio:
            told["audio_ids"].append(audio["id"])
        if "transcript" in audio:
            told["text"] += audio["transcript"]
        if "data" in audio:
            pcm += base64.b64decode(audio["data"], validate=True)
        told["order"] += [key for key in ("id", "transcript", "data", "expires_at") if key in audio]
    return told | {"pcm": base64.b64encode(pcm).decode(), "heard": transcript(client, pcm)}


def transcript(client: openai.OpenAI, pcm: bytes) -> str:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(24_000)
        writer.writeframes(pcm)
    upload = ("answer.wav", file.getvalue())
    return client.audio.transcriptions.create(model="whisper-1", file=upload).text


def speech(client: openai.OpenAI) -> dict[str, Any]:
    wanted: dict[str, Any] = {
        "model": "tts-1",
        "voice": "alloy",
        "input": "The train leaves at noon. Please be there early.",
    }
    wanted |= {"response_format": "pcm", "extra_body": {"seed": 7}}
    read = client.audio.speech.create(**wanted).read()
    with client.audio.speech.with_streaming_response.create(**wanted) as response:
        pieces = list(response.iter_bytes())
        kind = response.headers["content-type"]
    by_object = client.audio.speech.create(**wanted | {"voice": {"id": "heart"}}).read()
    return {
        "heard": transcript(client, read),
        "pieces": len(pieces),
        "same": b"".join(pieces) == read == by_object,
        "type": kind,
    }


def transcription(client: openai.OpenAI, spoken: Path) -> dict[str, Any]:
    create = client.audio.transcriptions.create
    told: dict[str, Any] = {}
    for form in ("json", "text", "verbose_json", "srt", "vtt"):
        answer = create(model="whisper-1", file=spoken, response_format=form, language="en")
        told[form] = answer if isinstance(answer, str) else answer.model_dump()
    stream = create(model="whisper-1", file=spoken, response_format="json", stream=True)
    told["events"] = [event.model_dump() for event in stream]
    return told


def errors(client: openai.OpenAI) -> dict[str, list[Any]]:
    """What each mistake raises."""
    hello: Any = [{"role": "user", "content": "Hello"}]
    mistakes: dict[str, Any] = {
        "model": lambda: client.chat.completions.create(model="nobody", messages=hello),
        "tools": lambda: client.chat.completions.create(
            model="embedded", messages=hello, tools=[{"type": "function", "function": {"name": "f"}}]
        ),
        "voice": lambda: client.audio.speech.create(model="tts-1", input="Hello", voice="nobody"),
        "stream": lambda: client.chat.completions.create(model="embedded", messages=hello, temperature=9, stream=True),
    }
    told = {}
    for name, make in mistakes.items():
        try:
            make()
        except openai.APIStatusError as error:
            told[name] = [type(error).__name__, error.status_code, error.param, error.code, error.message]
    return told


if __name__ == "__main__":
    json.dump(main(sys.argv[1], Path(sys.argv[2])), sys.stdout)
