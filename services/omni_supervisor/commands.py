"""The commands that talk to a running server: ask, say, transcribe, status."""

import argparse
import base64
import binascii
import contextlib
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from omni_common.errors import OmniError
from omni_common.frames import Fleet
from omni_supervisor.client import Client, events
from omni_supervisor.speech import Speech


async def ask(arguments: argparse.Namespace) -> None:
    """Stream the answer's text to the terminal; with --out or --play have it spoken too."""
    spoken = arguments.out is not None or arguments.play
    body: dict[str, Any] = {"model": arguments.model, "stream": True, "messages": _messages(arguments)}
    speech = Speech(arguments.out, arguments.play) if spoken else None
    if speech is not None:
        form = "pcm16" if speech.format == "pcm" else speech.format
        body |= {"modalities": ["text", "audio"], "audio": {"format": form, "voice": arguments.voice}}
    client = Client(arguments.url, arguments.api_key)
    text_in = ""
    async with (
        speech or contextlib.nullcontext(),
        client.request("POST", "/v1/chat/completions", json=body) as answer,
    ):
        async for event in events(answer):
            for choice in event.get("choices", []):
                text_in = await _hear(choice.get("delta") or {}, text_in, speech)
        print(flush=True)


async def _hear(delta: dict[str, Any], text_in: str, speech: Speech | None) -> str:
    """Print and keep one delta. The words come as `content` or as the audio's transcript: the first seen counts."""
    audio = delta.get("audio") or {}
    texts = {"content": delta.get("content"), "transcript": audio.get("transcript")}
    text_in = text_in or next((where for where, text in texts.items() if text), "")
    if text := texts.get(text_in):
        print(_printable(text), end="", flush=True)
    if speech is not None and audio.get("data"):
        try:
            await speech.write(base64.b64decode(audio["data"], validate=True))
        except binascii.Error as error:
            raise OmniError(f"the audio cannot be decoded: {error}") from None
    return text_in


def _messages(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if arguments.audio is not None:
        data = base64.b64encode(_read(arguments.audio)).decode()
        kind = arguments.audio.suffix.lower().lstrip(".") or "wav"
        parts.append({"type": "input_audio", "input_audio": {"data": data, "format": kind}})
    if arguments.question:
        parts.append({"type": "text", "text": arguments.question})
    if not parts:
        raise OmniError("ask what? Give a question, --audio FILE, or both")
    return [{"role": "user", "content": parts}]


async def say(arguments: argparse.Namespace) -> None:
    """Have a text spoken, into a file or to the loudspeaker."""
    if arguments.out is None and not arguments.play:
        raise OmniError("where to? Give --out FILE, --play, or both")
    async with Speech(arguments.out, arguments.play) as speech:
        body: dict[str, Any] = {
            "model": arguments.model,
            "input": arguments.text,
            "voice": arguments.voice,
            "speed": arguments.speed,
            "response_format": speech.format,
        }
        if arguments.ref_audio is not None:
            body["ref_audio"] = {"data": base64.b64encode(_read(arguments.ref_audio)).decode()}
        if arguments.ref_text:
            body["ref_text"] = arguments.ref_text
        client = Client(arguments.url, arguments.api_key)
        async with client.request("POST", "/v1/audio/speech", json=body) as answer:
            async for data in answer.content.iter_any():
                await speech.write(data)


async def transcribe(arguments: argparse.Namespace) -> None:
    """Print what is said in an audio file."""
    form = aiohttp.FormData({"model": arguments.model, "response_format": arguments.format})
    form.add_field("file", _read(arguments.file), filename=arguments.file.name)
    client = Client(arguments.url, arguments.api_key)
    async with client.request("POST", "/v1/audio/transcriptions", data=form) as answer:
        print(_printable(await answer.text()).rstrip("\n"))


async def status(arguments: argparse.Namespace) -> None:
    """Print the stages and replicas of a running system."""
    async with Client(arguments.url, arguments.api_key).request("GET", "/omni/status") as answer:
        body = await answer.read()
    if arguments.json:
        print(body.decode())
        return
    try:
        print(fleet_table(msgspec.json.decode(body, type=Fleet)))
    except msgspec.MsgspecError as error:
        raise OmniError(f"the server's status cannot be understood: {error}") from None


def fleet_table(fleet: Fleet) -> str:
    """The fleet for people: a line a replica, a line a stage that has none ready, a line of totals."""
    rows = [["STAGE", "REPLICA", "STATE", "LOAD", "WAITING", "ARENA", "PRODUCED", "PID", "HOST"]]
    waiting = {stage.stage: stage.waiting for stage in fleet.stages}
    order = {stage.stage: position for position, stage in enumerate(fleet.stages)}
    for replica in sorted(fleet.replicas, key=lambda r: (order.get(r.stage, len(order)), r.name)):
        loading = replica.state == "loading"
        rows.append(
            [
                replica.stage,
                replica.name,
                f"loading {replica.progress:.0%}" if loading else replica.state,
                f"{replica.running}/{replica.slots}",
                str(waiting.get(replica.stage, 0)),
                f"{replica.arena_used / 2**20:.1f}/{replica.arena_total / 2**20:.0f} MiB",
                str(replica.produced),
                str(replica.pid),
                replica.host,
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"missing: {stage.stage}: {stage.missing or 'no replica'}" for stage in fleet.stages if not stage.ready]
    lines += [f"{replica.name}: {replica.detail}" for replica in fleet.replicas if replica.detail]
    lines.append(
        f"requests: {fleet.running} running, {fleet.queued} queued, {fleet.completed} completed, "
        f"{fleet.failed} failed, {fleet.cancelled} cancelled, {fleet.rejected} rejected; processes lost: {fleet.deaths}"
    )
    return "\n".join(lines)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise OmniError(f"{path}: {error.strerror}") from None


def _printable(text: str) -> str:
    """Without control characters, which a terminal would obey."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t") if sys.stdout.isatty() else text
