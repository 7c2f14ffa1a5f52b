"""The talker: text to the latents of speech, one sentence (or clause) at a time.

Output is `Latent`; edge unit: frames of 12.5 ms. Arrays of a unit:

- `z` [130, F] float32, the latent of the whole unit;
- `f0` [F] float32, Hz, 0 where unvoiced;
- `heard` [2] int32: the frames [begin, end) to be made audible. The model begins and ends each unit with some 0.3 s and
  0.4 s of silence, which would hold up the first sound and tear sentences apart; what is left of it makes a pause of
  `PAUSES` between two units. The rest stays in `z`, as context, so what is heard equals the whole rendering.
"""

import logging
from collections import deque
from typing import Any

import numpy as np

from omni_common.errors import OmniError, invalid
from omni_common.frames import Latent, Text
from omni_common.params import Speech, split_speed
from omni_worker.engine import Job, LoadContext, Output, Piece
from omni_worker.models import hibari_graph
from omni_worker.models.hibari_text import Phonemizer
from omni_worker.segmenter import Boundary, Segmenter, Utterance

VOICES = ("heart",)
#: Frames of silence that are left behind a unit, by what its text ends with, and before it; at speed 1.
PAUSES: dict[Boundary, int] = {"sentence": 14, "clause": 4, "bound": 1}
LEAD = 4
#: The latent's last channel is a log energy (correlation 0.99 with the frame's level in dB): this is about -60 dBFS.
_ENERGY, _SILENCE = 129, -0.4
#: Most frames of a unit at speed 1, at rest and for each phoneme; real speech has 5 to 12 a phoneme.
_CAP_BASE, _CAP_PER_ID = 80, 24

log = logging.getLogger(__name__)


class Model:
    """hibari's text side. One utterance is computed at a time, so that nothing depends on other jobs."""

    def load(self, context: LoadContext) -> None:
        """Cut the graph, read the lexicons, speak a word that they do not have."""
        context.progress("cut the graph", 0.1)
        self._session = hibari_graph.session(hibari_graph.cut()[0], context.threads)
        context.progress("read the lexicons", 0.4)
        self.phonemize = Phonemizer()
        context.progress("warm up", 0.9)
        for ids in self.phonemize("Hello, hibarinese."):
            self.speak(ids, 1.0)

    def open(self, job: Job) -> "Talk":
        """Begin a job. Raises OmniError 400 when the voice is not known."""
        assert isinstance(job.params, Speech)
        if job.params.voice and job.params.voice not in VOICES:
            raise invalid(f"no voice {job.params.voice!r}; there are: {', '.join(VOICES)}", "voice")
        return Talk(self, job.request_id, split_speed(job.params.speed)[0])

    def speak(self, ids: list[int], speed: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Latent [130, F] and F0 [F] of one group of phoneme ids. Raises OmniError when they are not finite."""
        feed = {"ids": np.asarray([ids], np.int64), "speed": np.asarray([speed], np.float32)}
        z, f0 = (array[0] for array in self._session.run(None, feed))
        cap = int((_CAP_BASE + _CAP_PER_ID * len(ids)) / speed)
        if len(f0) > cap:
            log.warning("%d phonemes took %d frames: cut at %d", len(ids), len(f0), cap)
            z, f0 = z[:, :cap], f0[:cap]
        if not (np.isfinite(z).all() and np.isfinite(f0).all()):
            raise OmniError("the talker's latent is not finite", code="numerical_error")
        return np.ascontiguousarray(z), np.ascontiguousarray(f0)


class Talk:
    """One job: text in, a `Latent` for each group of phonemes out, and an empty last one."""

    def __init__(self, model: Model, request_id: str, speed: float) -> None:
        self._model = model
        self._request_id = request_id
        self._speed = speed
        self._segmenter = Segmenter()
        self._ended = False
        self._utterances: deque[Utterance] = deque()
        #: Groups of the current utterance that were not spoken yet.
        self._groups: deque[list[int]] = deque()
        self._boundary: Boundary = "sentence"
        #: Text that no output has carried yet, where it begins, and the frames sent.
        self._unsaid = ""
        self._character = 0
        self._frame = 0

    @property
    def ready(self) -> bool:
        return bool(self._groups or self._utterances or self._ended)

    def push(self, piece: Piece) -> None:
        """Take text."""
        if isinstance(piece.body, Text):
            self._utterances.extend(self._segmenter.feed(piece.body.text))
        elif piece.body is not None:
            raise invalid(f"the talker takes text, not {type(piece.body).__name__}")
        if piece.last:
            self._utterances.extend(self._segmenter.finish())
            self._ended = True

    def advance(self) -> Output | None:
        """Speak one group; None when the text at hand has nothing to say."""
        while not self._groups and self._utterances:
            utterance = self._utterances.popleft()
            self._unsaid += utterance.text
            self._boundary = utterance.boundary
            if utterance.speakable:
                self._groups.extend(self._model.phonemize(utterance.text))
        if self._groups:
            return self._unit(self._groups.popleft())
        return self._output(0, {}, last=True) if self._ended else None

    def _unit(self, ids: list[int]) -> Output:
        z, f0 = self._model.speak(ids, self._speed)
        boundary = "clause" if self._groups else self._boundary
        arrays = {"z": z, "f0": f0, "heard": _heard(z[_ENERGY], PAUSES[boundary], self._speed)}
        return self._output(len(f0), arrays, last=False)

    def _output(self, frames: int, arrays: dict[str, np.ndarray[Any, Any]], last: bool) -> Output:
        text, character, frame = self._unsaid, self._character, self._frame
        self._unsaid = ""
        self._character += len(text)
        self._frame += frames
        body = Latent(text=text, characters=(character, self._character), end_of_unit=True)
        return Output(self._request_id, frame, self._frame, last, body if frames or text else None, arrays)


def _heard(energy: np.ndarray[Any, Any], pause: int, speed: float) -> np.ndarray[Any, Any]:
    """[2] int32: the frames [begin, end) around those with sound; all when none has."""
    loud = np.flatnonzero(energy > _SILENCE)
    if not len(loud):
        return np.array([0, len(energy)], np.int32)
    begin = max(0, loud[0] - round(LEAD / speed))
    end = min(len(energy), loud[-1] + 1 + round(pause / speed))
    return np.array([begin, end], np.int32)
