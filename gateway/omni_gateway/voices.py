"""`/v1/audio/voices`: what there is to speak with, and uploads of more; `/v1/audio/models`: what speaks.

Open WebUI and others fill their menus from the two lists. All routes need a key like every other one. Open WebUI asks
for the lists without one and then shows OpenAI's names, which work here too. Uploads belong to all who have a key.
"""

import asyncio
import time
from typing import Any

import msgspec
from aiohttp import web

from omni_common.errors import OmniError, invalid
from omni_common.pipeline import Pipeline
from omni_gateway.context import BUS, VOICES
from omni_gateway.endpoint import own_voice
from omni_gateway.errors import quoted
from omni_gateway.form import Form, read_form
from omni_gateway.media.decode import decode_at_own_rate
from omni_gateway.media.encode import encode
from omni_gateway.speech_reference import LONGEST_S, UNSET, check_length, clones
from omni_gateway.stream import Bus
from omni_gateway.voice_store import StoredVoice

_NOTE = "A voice with `alias_of` is another name for that voice. Names are taken in any case."
_SAMPLE = "audio_sample"
_SAMPLE_BYTES = 10 << 20
_TYPES = tuple(f"audio/{kind}" for kind in ("mpeg", "wav", "x-wav", "ogg", "aac", "flac", "webm", "mp4"))
#: What clients say that do not know; the bytes tell it.
_UNTOLD = ("", "application/octet-stream")
#: Characters of a text field of the form.
_MOST_CHARS = {"name": 100, "consent": 500, "ref_text": 4096, "speaker_description": 2000}


def add_routes(app: web.Application) -> None:
    app.router.add_get("/v1/audio/voices", list_voices)
    app.router.add_post("/v1/audio/voices", upload_voice)
    app.router.add_delete("/v1/audio/voices/{name}", delete_voice)
    app.router.add_get("/v1/audio/models", list_models)


async def list_voices(request: web.Request) -> web.Response:
    """Every voice once, then every alias as an entry of its own, so that it can be chosen, then what was uploaded."""
    pipelines = request.app[BUS].pipelines.values()
    stored = await asyncio.to_thread(request.app[VOICES].voices)
    voices: dict[str, dict[str, Any]] = {}
    aliases: dict[str, dict[str, Any]] = {}
    for pipeline in pipelines:
        for voice in pipeline.voices:
            name = voice.name or voice.id
            entry = voices.setdefault(voice.id, {"id": voice.id, "name": name, "models": []})
            entry["models"].append(pipeline.name)
            for alias in voice.aliases:
                label = f"{alias.capitalize()} ({name})"
                entry = aliases.setdefault(alias, {"id": alias, "name": label, "alias_of": voice.id, "models": []})
                entry["models"].append(pipeline.name)
    entries = [*voices.values(), *(entry for alias, entry in aliases.items() if alias not in voices)]
    if cloning := [pipeline.name for pipeline in pipelines if clones(pipeline)]:
        entries += [{"id": voice.name, "name": voice.name, "models": cloning} for voice in stored]
    uploaded = [{**_shown(voice), "embedding_source": "audio", "embedding_dim": None} for voice in stored]
    return web.json_response({"voices": entries, "uploaded_voices": uploaded, "note": _NOTE})


async def upload_voice(request: web.Request) -> web.Response:
    """Takes the place of an earlier upload of the same name."""
    bus, store = request.app[BUS], request.app[VOICES]
    if not any(clones(pipeline) for pipeline in bus.pipelines.values()):
        raise invalid("No model here clones voices, so none can be uploaded.", code="unsupported_endpoint")
    if not store.takes:
        raise invalid("This server has no folder to keep voices in.", code="unsupported_endpoint")
    form = await read_form(request, _SAMPLE, _SAMPLE_BYTES)
    if form.text("speaker_embedding") is not None:
        message = "speaker_embedding is not supported: no model here takes one"
        raise invalid(message, "speaker_embedding", code="unsupported_parameter")
    name = _new_name(_text(form, "name", required=True), bus)
    consent = _text(form, "consent", required=True)
    ref_text, description = _text(form, "ref_text"), _text(form, "speaker_description")
    if form.file is None:
        raise invalid(f"{_SAMPLE} is missing", _SAMPLE, code="missing_required_parameter")
    if form.file_type not in (*_TYPES, *_UNTOLD):
        valid = ", ".join(_TYPES)
        raise invalid(f"{_SAMPLE}: the type {quoted(form.file_type)} is not one of {valid}", _SAMPLE)
    samples, rate = await decode_at_own_rate(form.file, max_seconds=LONGEST_S, max_bytes=_SAMPLE_BYTES, param=_SAMPLE)
    check_length(len(samples) / rate, _SAMPLE)
    voice = StoredVoice(
        name=name,
        consent=consent,
        created_at=int(time.time()),
        file_size=len(form.file),
        mime_type=form.file_type or _UNTOLD[1],
        ref_text=ref_text,
        speaker_description=description,
    )
    await asyncio.to_thread(store.put, voice, await encode(samples, "flac", rate))
    return web.json_response({"success": True, "voice": _shown(voice)})


async def delete_voice(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if not await asyncio.to_thread(request.app[VOICES].delete, name):
        raise invalid(f"No uploaded voice is called {quoted(name)}.", "name", code="voice_not_found", status=404)
    return web.json_response({"success": True, "message": f"The voice {quoted(name)} is deleted."})


async def list_models(request: web.Request) -> web.Response:
    """Every name under which something speaks."""
    speaking = [p for p in request.app[BUS].pipelines.values() if "speech" in p.tasks]
    return web.json_response({"models": [{"id": name} for name in dict.fromkeys(_names(speaking))]})


def _names(pipelines: list[Pipeline]) -> list[str]:
    return [p.name for p in pipelines] + [alias for p in pipelines for alias in p.aliases]


def _text(form: Form, field: str, *, required: bool = False) -> str:
    """A text field, empty if it is not there. Raises OmniError 400 with the field."""
    text = form.text(field) or ""
    if not text and required:
        raise invalid(f"{field} is missing", field, code="missing_required_parameter")
    if len(text) > (most := _MOST_CHARS[field]):
        raise invalid(f"{field} has {len(text)} characters, more than {most}", field, code="string_above_max_length")
    return text


def _new_name(name: str, bus: Bus) -> str:
    """Raises OmniError 400 for what cannot be a name, or means a voice already."""
    if name in (".", "..") or not name.isprintable() or any(mark in name for mark in "/\\"):
        message = f"name: {quoted(name)} cannot be a voice's: no / or \\, nothing unprintable, not . or .."
        raise invalid(message, "name")
    if name.casefold() == UNSET or any(own_voice(pipeline, name) for pipeline in bus.pipelines.values()):
        raise _reserved(name)
    return name


def _reserved(name: str) -> OmniError:
    return invalid(f"name: {quoted(name)} means a voice of a model here; choose another", "name", code="voice_exists")


def _shown(voice: StoredVoice) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(voice).items() if value != ""}
