"""What stages speak as the bytes of one container, faster or slower where they cannot do that themselves."""

from collections.abc import AsyncGenerator, AsyncIterable

from omni_common.errors import invalid
from omni_common.frames import Audio
from omni_gateway.endpoint import samples_of
from omni_gateway.media.encode import Encoder
from omni_gateway.media.tempo import Tempo
from omni_gateway.speech_ask import TASK, SpeechJob
from omni_gateway.stream import Event

_TOKENS_PER_S = 20


class Sound:
    """The encoded sound of one answer; with `whole` its container states its true length."""

    def __init__(self, job: SpeechJob, *, whole: bool = False) -> None:
        self.job = job
        self._whole = whole
        self._samples = 0
        self._rate = job.ask.pipeline.audio_rate

    async def pieces(self, events: AsyncIterable[Event]) -> AsyncGenerator[bytes, None]:
        """Pieces of one container, none empty, at least one. Raises OmniError 400 `nothing_to_speak` for no sound."""
        stage = self.job.ask.pipeline.tasks[TASK].output["audio"]
        encoder, tempo = None, None
        try:
            async for event in events:
                samples = samples_of(event)
                if not isinstance(event.body, Audio) or not samples.size:
                    continue
                if encoder is None:
                    self._rate = event.body.rate
                    encoder = Encoder(self.job.format, self._rate, whole=self._whole, stage=stage)
                    tempo = Tempo(self._rate, self.job.stretch) if self.job.stretch != 1.0 else None
                if tempo is not None:
                    samples = await tempo.feed(samples)
                self._samples += samples.size
                if samples.size and (data := await encoder.feed(samples)):
                    yield data
            if encoder is not None and tempo is not None:
                samples = await tempo.finish()
                self._samples += samples.size
                if samples.size and (data := await encoder.feed(samples)):
                    yield data
            if encoder is None or not self._samples:
                raise invalid("input has nothing that can be spoken", "input", code="nothing_to_speak")
            if data := await encoder.finish():
                yield data
        finally:
            for owned in (tempo, encoder):
                if owned is not None:
                    await owned.close()

    def usage(self) -> dict[str, int | dict[str, int]]:
        spoken = -(-self._samples * _TOKENS_PER_S // self._rate)
        read = self.job.characters
        return {
            "input_tokens": read,
            "output_tokens": spoken,
            "total_tokens": read + spoken,
            "input_token_details": {"text_tokens": read, "audio_tokens": 0},
        }
