"""The commands against a server that answers as OpenAI's API does."""

import argparse
import base64
import json
import wave
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from omni_common.errors import OmniError
from omni_common.frames import Fleet, Replica, StageStatus
from omni_supervisor import commands
from omni_supervisor.cli import _parser, main
from omni_supervisor.speech import Speech

PCM = bytes(range(256)) * 20
FLEET = Fleet(
    scheduler="s",
    stages=[StageStatus(stage="thinker", ready=1, waiting=2), StageStatus("talker", 0, 0, "its process ended")],
    replicas=[
        Replica("talker-0", "i2", "talker", "loading", detail="weights", progress=0.5, slots=4),
        Replica("thinker-0", "i1", "thinker", "ready", pid=7, slots=16, running=3, arena_used=2**20, arena_total=2**26),
    ],
    completed=9,
)


class Server:
    """Keeps the last request; a test sets the answer."""

    def __init__(self) -> None:
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self._handle)
        self.request: dict = {}
        self.events: list[dict | str] = []
        self.status = 200
        self.body = b""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.request = {"path": request.path, "key": request.headers.get("Authorization")}
        if request.content_type == "application/json":
            self.request["json"] = await request.json()
        elif request.content_type == "multipart/form-data":
            form = await request.post()
            self.request["form"] = {k: v.file.read() if isinstance(v, web.FileField) else v for k, v in form.items()}
            for field in form.values():
                if isinstance(field, web.FileField):
                    field.file.close()
        if not self.events:
            return web.Response(status=self.status, body=self.body)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for event in self.events:
            data = event if isinstance(event, str) else f"data: {json.dumps(event)}"
            await answer.write(f"{data}\n\n".encode())
        return answer


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    test_server = TestServer(server.app)
    await test_server.start_server()
    server.url = str(test_server.make_url("/"))
    yield server
    await test_server.close()


def parse(server: Server, *argv: str) -> argparse.Namespace:
    return _parser().parse_args([*argv, "--url", server.url, "--api-key", "k1"])


def delta(**fields: object) -> dict:
    return {"choices": [{"index": 0, "delta": fields}]}


async def test_ask_streams_text(server: Server, capsys) -> None:
    server.events = [delta(role="assistant"), delta(content="Par"), ": alive", delta(content="is."), "data: [DONE]"]
    await commands.ask(parse(server, "ask", "Capital?"))
    assert capsys.readouterr().out == "Paris.\n"
    assert server.request["key"] == "Bearer k1"
    assert server.request["json"] == {
        "model": "embedded",
        "stream": True,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Capital?"}]}],
    }


async def test_ask_by_voice_saves_the_spoken_answer(server: Server, capsys, tmp_path: Path) -> None:
    question = tmp_path / "q.wav"
    question.write_bytes(b"RIFF")
    halves = [base64.b64encode(part).decode() for part in (PCM[:1000], PCM[1000:])]
    server.events = [
        delta(audio={"id": "a", "transcript": "Paris"}),
        delta(audio={"data": halves[0], "transcript": "."}),
        delta(audio={"data": halves[1]}),
        {"choices": [], "usage": {}},
        "data: [DONE]",
    ]
    out = tmp_path / "answer.wav"
    await commands.ask(parse(server, "ask", "--audio", str(question), "--out", str(out)))
    assert capsys.readouterr().out == "Paris.\n"
    with wave.open(str(out)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24000, 1, 2)
        assert file.readframes(10**6) == PCM
    sent = server.request["json"]
    assert sent["modalities"] == ["text", "audio"]
    assert sent["audio"] == {"format": "pcm16", "voice": "default"}
    assert sent["messages"][0]["content"] == [
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"RIFF").decode(), "format": "wav"}}
    ]


async def test_text_that_comes_twice_is_printed_once(server: Server, capsys) -> None:
    server.events = [delta(content="Hi"), delta(audio={"transcript": "Hi"}), "data: [DONE]"]
    await commands.ask(parse(server, "ask", "x"))
    assert capsys.readouterr().out == "Hi\n"


@pytest.mark.parametrize(
    ("end", "message"),
    [({"error": {"message": "stage lost", "param": None}}, "stage lost"), (delta(), "broke off")],
)
async def test_an_answer_that_fails_half_way_is_told_and_not_kept(
    server: Server, tmp_path: Path, end: dict, message: str
) -> None:
    server.events = [delta(audio={"data": base64.b64encode(PCM).decode()}), end]
    out = tmp_path / "answer.wav"
    with pytest.raises(OmniError, match=message):
        await commands.ask(parse(server, "ask", "x", "--out", str(out)))
    assert not out.exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no such voice", "param": "voice"}}', "no such voice (voice)"),
        (b"<html>\n bad gateway", "the server answered 400: <html> bad gateway"),
        (b'{"error": "text"}', "the server answered 400"),
        (b"[1]", "the server answered 400"),
        (b"", "the server answered 400"),
    ],
)
async def test_errors_are_one_line(server: Server, tmp_path: Path, body: bytes, message: str) -> None:
    server.status, server.body = 400, body
    with pytest.raises(OmniError) as error:
        await commands.say(parse(server, "say", "hi", "--out", str(tmp_path / "x.wav")))
    assert message in error.value.message
    assert "\n" not in error.value.message


@pytest.mark.parametrize(("suffix", "form"), [("wav", "pcm"), ("mp3", "mp3"), ("ogg", "opus"), ("pcm", "pcm")])
async def test_say_asks_for_the_format_of_the_file(server: Server, tmp_path: Path, suffix: str, form: str) -> None:
    server.body = PCM
    out = tmp_path / f"x.{suffix}"
    await commands.say(parse(server, "say", "hello", "--out", str(out), "--speed", "1.5"))
    assert server.request["json"] == {
        "model": "speech", "input": "hello", "voice": "default", "speed": 1.5, "response_format": form,
    }  # fmt: skip
    assert out.read_bytes()[44 if suffix == "wav" else 0 :] == PCM


async def test_say_sends_the_sound_to_speak_like(server: Server, tmp_path: Path) -> None:
    server.body = PCM
    sound = tmp_path / "me.mp3"
    sound.write_bytes(b"\xff\xfb")
    out = str(tmp_path / "x.wav")
    await commands.say(parse(server, "say", "hi", "--out", out, "--ref-audio", str(sound), "--ref-text", "It is me."))
    sent = server.request["json"]
    assert (sent["voice"], sent["ref_audio"], sent["ref_text"]) == ("default", {"data": "//s="}, "It is me.")


async def test_transcribe_sends_the_file(server: Server, tmp_path: Path, capsys) -> None:
    server.body = b"Hello.\n"
    audio = tmp_path / "a.mp3"
    audio.write_bytes(b"\xff\xfb")
    await commands.transcribe(parse(server, "transcribe", str(audio)))
    assert capsys.readouterr().out == "Hello.\n"
    assert server.request["form"] == {"model": "embedded", "response_format": "text", "file": b"\xff\xfb"}


async def test_status_is_a_table(server: Server, capsys) -> None:
    server.body = msgspec.json.encode(FLEET)
    await commands.status(parse(server, "status"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:7] == ["thinker", "thinker-0", "ready", "3/16", "2", "1.0/64", "MiB"]
    assert lines[2].split()[:4] == ["talker", "talker-0", "loading", "50%"]
    assert "missing: talker: its process ended" in lines
    assert "talker-0: weights" in lines
    assert "9 completed" in lines[-1]


async def test_status_as_json_and_of_another_server(server: Server, capsys) -> None:
    server.body = msgspec.json.encode(FLEET)
    await commands.status(parse(server, "status", "--json"))
    assert msgspec.json.decode(capsys.readouterr().out, type=Fleet) == FLEET
    server.body = b"{}"
    with pytest.raises(OmniError, match="cannot be understood"):
        await commands.status(parse(server, "status"))


@pytest.mark.parametrize(
    "argv",
    [
        ["ask", "hi", "--url", "http://127.0.0.1:9"],
        ["ask", "hi", "--url", "nonsense"],
        ["ask"],
        ["say", "hi"],
        ["say", "hi", "--out", "x.exe"],
        ["say", "hi", "--out", "x.wav", "--ref-audio", "/nonexistent.wav"],
        ["transcribe", "/nonexistent.wav"],
        ["status", "--url", "http://127.0.0.1:9"],
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_1(argv: list[str], capsys) -> None:
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("omni: ") and error.count("\n") == 1


async def test_play_feeds_the_player_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    player = tmp_path / "aplay"
    player.write_text(f"#!/bin/sh\nexec /bin/cat > {tmp_path}/played\n")
    player.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    async with Speech(None, play=True) as speech:
        await speech.write(PCM)
        await speech.write(PCM)
    assert (tmp_path / "played").read_bytes() == PCM * 2


async def test_a_broken_stream_ends_the_player(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    player = tmp_path / "aplay"
    player.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    player.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OmniError, match="broke"):
        async with Speech(None, play=True) as speech:
            await speech.write(PCM)
            raise OmniError("the connection broke")


def test_what_cannot_be_played_is_said_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OmniError, match="none of aplay"):
        Speech(None, play=True)
    with pytest.raises(OmniError, match="--play goes with"):
        Speech(Path("x.mp3"), play=True)
