"""Voices that clients uploaded: a folder of files that every gateway of the system reads, and that outlives them all.

A voice is one file, a zip archive of `voice.json` and `sound.flac`, so it is there whole or not at all: it is written
under another name, flushed to the disk and renamed. Its name is a digest of the voice's, never the client's own text.
Nothing is kept in memory but what a listing read before, by the time of the file, so what one gateway writes the
others see with their next look. A file that cannot be read is left alone, with a line in the log.
"""

import fcntl
import hashlib
import logging
import os
import tempfile
import unicodedata
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from omni_common.errors import invalid

log = logging.getLogger("omni.gateway")

#: Most voices of one folder.
MOST = 1000
_SUFFIX = ".voice.zip"
#: Of files that are being written; what a crash leaves of them goes with the next upload.
_UNFINISHED = ".unfinished"
_ABOUT = "voice.json"
_SOUND = "sound.flac"
#: What reading a file raises that no gateway wrote so; zipfile gives up in most of these ways.
_UNREADABLE = (OSError, zipfile.BadZipFile, EOFError, KeyError, RuntimeError, ValueError, msgspec.MsgspecError)


class StoredVoice(msgspec.Struct, frozen=True):
    """What is known of an uploaded voice besides its sound."""

    name: str
    #: The client's record of the speaker's consent.
    consent: str
    #: Seconds since the epoch.
    created_at: int
    #: Bytes and media type of the upload.
    file_size: int
    mime_type: str
    #: What is said in the sample; empty: not known.
    ref_text: str = ""
    speaker_description: str = ""


class VoiceStore:
    """Voices by name, in any case. Every method blocks on the disk: call them in a thread.

    Without a `folder` there are none, and none are taken. What cannot be written raises OSError.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        #: By path: when it was written and by which inode, and what it said then (`None`: nothing readable).
        self._seen: dict[Path, tuple[tuple[int, int], StoredVoice | None]] = {}

    @property
    def takes(self) -> bool:
        return self._folder is not None

    def voices(self) -> list[StoredVoice]:
        """All of them, by name."""
        if self._folder is None:
            return []
        seen: dict[Path, tuple[tuple[int, int], StoredVoice | None]] = {}
        for path in self._folder.glob("*" + _SUFFIX):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            stamp = (status.st_mtime_ns, status.st_ino)
            before = self._seen.get(path)
            seen[path] = before if before and before[0] == stamp else (stamp, self._about(path))
        self._seen = seen
        return sorted((voice for _, voice in seen.values() if voice), key=lambda voice: voice.name.casefold())

    def find(self, name: str) -> StoredVoice | None:
        return None if self._folder is None else self._about(self._path(self._folder, name))

    def sound(self, voice: StoredVoice) -> bytes | None:
        """A FLAC file; `None`: the voice is gone, or another upload has taken its name."""
        if self._folder is None:
            return None
        read = self._read(self._path(self._folder, voice.name), _SOUND)
        return read[1] if read is not None and read[0] == voice else None

    def put(self, voice: StoredVoice, sound: bytes) -> None:
        """Keep `voice` with its FLAC file, in place of one of its name. Raises OmniError 400 when it is too many."""
        if self._folder is None:
            raise OSError("there is no folder for voices")
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._path(self._folder, voice.name)
        with self._alone(self._folder):
            for left in self._folder.glob("*" + _UNFINISHED):
                left.unlink()
            if not path.exists() and sum(1 for _ in self._folder.glob("*" + _SUFFIX)) >= MOST:
                raise invalid(f"There are {MOST} uploaded voices; delete one first.", "name", code="too_many_voices")
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=_UNFINISHED, delete=False) as file:
                with zipfile.ZipFile(file, "w") as archive:
                    archive.writestr(_ABOUT, msgspec.json.encode(voice))
                    archive.writestr(_SOUND, sound)
                file.flush()
                os.fsync(file.fileno())
            os.replace(file.name, path)
            _sync(self._folder)

    def delete(self, name: str) -> bool:
        """False: there was no such voice."""
        if self._folder is None:
            return False
        try:
            self._path(self._folder, name).unlink()
        except FileNotFoundError:
            return False
        _sync(self._folder)
        return True

    @staticmethod
    def _path(folder: Path, name: str) -> Path:
        key = unicodedata.normalize("NFC", name).casefold()
        # A name from a URL may be no Unicode; it is then no voice's.
        return folder / (hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest() + _SUFFIX)

    def _about(self, path: Path) -> StoredVoice | None:
        read = self._read(path)
        return None if read is None else read[0]

    def _read(self, path: Path, member: str = _ABOUT) -> tuple[StoredVoice, bytes] | None:
        """What a file says, and one of its members; `None` when it is not there or not whole."""
        try:
            with zipfile.ZipFile(path) as archive:
                voice = msgspec.json.decode(archive.read(_ABOUT), type=StoredVoice)
                if self._path(path.parent, voice.name) != path:
                    raise ValueError("it has another voice's name")
                return voice, archive.read(member)
        except FileNotFoundError:
            return None
        except _UNREADABLE as error:
            log.warning("%s is no voice: %s", path, error)
            return None

    @contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        """No other thread or gateway writes to the folder meanwhile."""
        with (folder / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _sync(folder: Path) -> None:
    """What was renamed or removed stays so after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
