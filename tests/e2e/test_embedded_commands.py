"""The `omni` commands with the real pipeline behind them."""

import subprocess
import wave
from pathlib import Path

import pytest

from e2e.clients.instance import Instance, command, wait_until
from e2e.clients.sound import RATE, decode

pytestmark = pytest.mark.embedded


def seconds(path: Path) -> float:
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        return float(file.getnframes() / RATE)


def test_say_transcribe_and_ask(instance: Instance, spoken_question: Path, tmp_path: Path) -> None:
    """The whole loop by hand: say a question, have it transcribed, ask it, and listen to the answer."""
    assert 1 < seconds(spoken_question) < 4
    assert instance.omni("transcribe", str(spoken_question)) == "What is the capital of France?\n"
    answer = tmp_path / "answer.wav"
    by_voice = instance.omni("ask", "--audio", str(spoken_question), "--out", str(answer))
    assert "Paris" in by_voice and by_voice.endswith("\n")
    assert "Paris" in instance.omni("transcribe", str(answer))
    assert instance.omni("ask", "What is the capital of France?") == by_voice


@pytest.mark.parametrize("suffix", ["wav", "mp3", "flac", "opus", "aac"])
def test_say_keeps_what_the_name_says(instance: Instance, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"x.{suffix}"
    assert instance.omni("say", "Good morning, everybody.", "--out", str(file), "--speed", "0.9") == ""
    sound = decode(file.read_bytes())
    assert 1 < sound.seconds < 3
    assert suffix in {"wav": ["wav"], "ogg": ["opus"]}.get(sound.container, sound.container.split(","))


def test_transcribe_formats(instance: Instance, spoken_question: Path) -> None:
    assert instance.omni("transcribe", str(spoken_question), "--format", "srt").startswith("1\n00:00:00,000 --> ")
    assert '"segments"' in instance.omni("transcribe", str(spoken_question), "--format", "verbose_json")


def test_status(instance: Instance) -> None:
    lines = instance.omni("status").splitlines()
    assert lines[0].split()[:4] == ["STAGE", "REPLICA", "STATE", "LOAD"]
    replicas = [line.split()[:3] for line in lines[1:5]]
    assert replicas == [[stage, f"{stage}-0", "ready"] for stage in ("listener", "thinker", "talker", "code2wav")]
    # Its client has an answer a moment before the scheduler hears that the last stage ended.
    idle = "requests: 0 running, 0 queued"
    wait_until(lambda: instance.omni("status").splitlines()[5].startswith(idle), "all requests have ended")


def test_validate_and_mistakes(instance: Instance, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([command("omni"), *arguments], capture_output=True, text=True, timeout=60)

    shown = run("validate", "embedded,speech")
    assert shown.returncode == 0
    assert all(stage in shown.stdout for stage in ("listener", "thinker", "talker", "code2wav"))
    wrong = run("validate", "embeded")
    assert wrong.returncode == 2 and "embedded" in wrong.stderr
    missing = run("transcribe", str(tmp_path / "none.wav"), "--url", instance.url)
    assert missing.returncode == 1 and missing.stderr.startswith("omni: ") and "none.wav" in missing.stderr
    silent = run("say", "...", "--out", str(tmp_path / "x.wav"), "--url", instance.url)
    assert silent.returncode == 1 and "nothing that can be spoken" in silent.stderr
    assert not list(tmp_path.iterdir())
