"""Uploaded voices on the disk: what others see at once, what a crash leaves, and what is no voice."""

import logging
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import msgspec
import pytest

from omni_common.errors import OmniError
from omni_gateway import voice_store
from omni_gateway.main import default_voices
from omni_gateway.voice_store import StoredVoice, VoiceStore

SOUND = b"fLaC" + bytes(range(256)) * 40


def voice(name: str = "Zoë", **more: object) -> StoredVoice:
    return msgspec.convert(
        {"name": name, "consent": "yes", "created_at": 1, "file_size": 2, "mime_type": "audio/wav", **more}, StoredVoice
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data" / "voices"


@pytest.fixture
def store(folder: Path) -> VoiceStore:
    return VoiceStore(folder)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_a_voice_is_kept_in_one_private_file_whose_name_says_nothing(store: VoiceStore, folder: Path) -> None:
    assert store.voices() == [] and store.find("Zoë") is None, "before there is a folder"
    store.put(voice(ref_text="Hi."), SOUND)
    [name] = files(folder)
    assert name.removesuffix(".voice.zip").isalnum() and "zo" not in name.lower()
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / name).stat().st_mode & 0o777 == 0o600
    assert VoiceStore(folder).voices() == [voice(ref_text="Hi.")]
    assert VoiceStore(folder).sound(voice(ref_text="Hi.")) == SOUND
    with zipfile.ZipFile(folder / name) as archive:
        assert archive.namelist() == ["voice.json", "sound.flac"]


@pytest.mark.parametrize("other", ["zoë", "ZOË", "Zoe\u0308"])
def test_names_are_the_same_in_any_case_and_form(store: VoiceStore, folder: Path, other: str) -> None:
    store.put(voice(), SOUND)
    assert store.find(other) == voice()
    store.put(voice(other), SOUND[:9])
    assert len(files(folder)) == 1, "the later upload takes the place"
    assert store.sound(voice(other)) == SOUND[:9]
    assert store.sound(voice()) is None, "never the sound of another upload"
    assert store.delete("ZOË") and not store.delete("ZOË")
    assert store.find(other) is None and files(folder) == []


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a\0b", "CON", "\udcff", "x" * 10_000, "."])
def test_a_name_never_becomes_a_path(store: VoiceStore, folder: Path, tmp_path: Path, name: str) -> None:
    """B080."""
    store.put(voice(), SOUND)
    assert store.find(name) is None
    assert not store.delete(name)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"] == files(folder)


def test_other_stores_of_the_folder_see_everything_at_once(store: VoiceStore, folder: Path) -> None:
    other = VoiceStore(folder)
    assert other.voices() == []
    store.put(voice("b"), SOUND)
    store.put(voice("A"), SOUND)
    assert [v.name for v in other.voices()] == ["A", "b"]
    assert other.find("B") == voice("b")
    store.put(voice("b", consent="again"), SOUND)
    assert other.voices()[1].consent == "again" and other.sound(other.voices()[1]) == SOUND
    store.delete("a")
    assert [v.name for v in other.voices()] == ["b"] and other.find("a") is None


def test_a_listing_reads_each_file_once(store: VoiceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(voice("a"), SOUND)
    store.put(voice("b"), SOUND)
    assert len(store.voices()) == 2
    opened: list[object] = []
    real = zipfile.ZipFile
    monkeypatch.setattr(voice_store.zipfile, "ZipFile", lambda *a: opened.append(a) or real(*a))
    assert len(store.voices()) == 2 and not opened
    store.put(voice("a", consent="new"), SOUND)
    opened.clear()
    assert [v.consent for v in store.voices()] == ["new", "yes"] and len(opened) == 1


def rot(path: Path, at: bytes) -> None:
    data = path.read_bytes()
    where = data.index(at)
    path.write_bytes(data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :])


@pytest.mark.parametrize(
    "how", ["empty", "short", "text", "json", "fields", "sound", "no_sound", "other_name", "folder"]
)
def test_what_is_no_whole_voice_is_skipped_with_a_line(
    store: VoiceStore, folder: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(voice("good"), SOUND)
    store.put(voice("bad"), SOUND)
    path = next(folder / name for name in files(folder) if voice("bad") == VoiceStore(folder)._about(folder / name))
    if how == "empty":
        path.write_bytes(b"")
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "text":
        path.write_bytes(b"hello")
    elif how == "json":
        rot(path, b'"consent"')
    elif how == "sound":
        rot(path, SOUND[50:90])
    elif how == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.unlink()
        with zipfile.ZipFile(path, "w") as archive:
            about: object = voice("bad" if how == "no_sound" else "ugly")
            archive.writestr("voice.json", msgspec.json.encode({"name": "bad"} if how == "fields" else about))
    caplog.clear()
    if how in ("sound", "no_sound"):
        assert store.sound(voice("bad")) is None
    else:
        assert [v.name for v in store.voices()] == ["good"]
        assert store.find("bad") is None
    warned = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert warned and path.name in warned[0].getMessage()
    assert store.sound(voice("good")) == SOUND


def test_an_upload_mends_what_was_broken(store: VoiceStore, folder: Path) -> None:
    store.put(voice(), SOUND)
    (folder / files(folder)[0]).write_bytes(b"")
    store.put(voice(), SOUND)
    assert store.sound(voice()) == SOUND


def test_no_more_than_the_most(store: VoiceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert voice_store.MOST == 1000
    monkeypatch.setattr(voice_store, "MOST", 3)
    for name in "abc":
        store.put(voice(name), SOUND)
    with pytest.raises(OmniError) as refused:
        store.put(voice("d"), SOUND)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "name", "too_many_voices")
    store.put(voice("B", consent="in place of b"), SOUND)
    store.delete("a")
    store.put(voice("d"), SOUND)
    assert [v.name for v in store.voices()] == ["B", "c", "d"]


def test_many_at_once_stay_below_the_most(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice_store, "MOST", 5)
    refused: list[str] = []

    def put(name: str) -> None:
        try:
            VoiceStore(folder).put(voice(name), SOUND)
        except OmniError as error:
            refused.append(error.code)

    threads = [threading.Thread(target=put, args=(f"v{i}",)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == ["too_many_voices"] * 7 and len(VoiceStore(folder).voices()) == 5


KILLED = """
import os, signal, sys
from pathlib import Path
from omni_gateway.voice_store import StoredVoice, VoiceStore
step = sys.argv[2]
real = getattr(os, step)
setattr(os, step, lambda *a: os.kill(os.getpid(), signal.SIGKILL))
VoiceStore(Path(sys.argv[1])).put(StoredVoice("zoe", "new", 1, 2, "audio/wav"), b"new sound")
"""


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_gateway_killed_while_it_writes_leaves_the_old_voice_and_nothing_else(
    store: VoiceStore, folder: Path, step: str
) -> None:
    """It also holds the folder's lock then."""
    store.put(voice("zoe"), SOUND)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder), step], env=dict(os.environ), timeout=60)
    assert killed.returncode == -9
    assert len(files(folder)) == 2, "what was written so far"
    assert store.voices() == [voice("zoe")] and store.sound(voice("zoe")) == SOUND
    store.put(voice("ann"), SOUND)
    assert len(files(folder)) == 2
    assert [v.name for v in store.voices()] == ["ann", "zoe"]


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    store = VoiceStore(None)
    assert store.voices() == [] and store.find("a") is None and store.sound(voice()) is None and not store.delete("a")
    assert not store.takes
    with pytest.raises(OSError):
        store.put(voice(), SOUND)


def test_the_folder_is_the_users_own_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_voices() == Path("/data/omnibus/voices")
    monkeypatch.setenv("HOME", "/home/me")
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_DATA_HOME", unset)
        assert default_voices() == Path("/home/me/.local/share/omnibus/voices")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert default_voices() is None
