"""What was said under which audio id, so that the next turn can name an answer by its id alone."""

import time
from collections import OrderedDict
from collections.abc import Callable

_TTL_S = 3600
_MAX_CHARS = 8 * 1024 * 1024
_ENTRY_CHARS = 200


class AudioStore:
    """Transcripts by owner (an API key's digest) and audio id: in this gateway's memory, for an hour, bounded.

    `clock` gives seconds since the epoch, as in the `expires_at` that clients see.
    """

    def __init__(self, clock: Callable[[], float] = time.time, max_chars: int = _MAX_CHARS) -> None:
        self._clock = clock
        self._max_chars = max_chars
        #: (transcript, expires_at), oldest first.
        self._entries: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()
        self._chars = 0

    def expiry(self) -> int:
        """The `expires_at` of an audio that is made now."""
        return int(self._clock()) + _TTL_S

    def put(self, owner: str, audio_id: str, transcript: str, expires_at: int) -> None:
        self._entries[owner, audio_id] = (transcript, expires_at)
        self._chars += len(transcript) + _ENTRY_CHARS
        while self._entries and (self._chars > self._max_chars or self._oldest_expired()):
            _, (text, _) = self._entries.popitem(last=False)
            self._chars -= len(text) + _ENTRY_CHARS

    def get(self, owner: str, audio_id: str) -> str | None:
        """The transcript; `None` when there is none, it has expired, or it belongs to someone else."""
        transcript, expires_at = self._entries.get((owner, audio_id), (None, 0))
        return transcript if expires_at > self._clock() else None

    def _oldest_expired(self) -> bool:
        _, expires_at = next(iter(self._entries.values()))
        return expires_at <= self._clock()
