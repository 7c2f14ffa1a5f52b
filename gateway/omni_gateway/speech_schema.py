"""The body of `POST /v1/audio/speech`, as OpenAI's clients and the peer's send it; unknown fields are ignored."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from omni_common.params import INT_MAX
from omni_gateway.chat_schema import InputAudio, VoiceRef


class ReferenceEntry(msgspec.Struct):
    """The other way to say `ref_audio` and `ref_text`. Either name of the sound is an address, never a file's path."""

    audio_path: str | None = None
    audio: str | None = None
    text: str | None = None


class SpeechFields(msgspec.Struct, kw_only=True):
    """What a request says besides its text; a batch says it for all of its items."""

    model: str | None = None
    voice: str | VoiceRef | None = None
    instructions: str | None = None
    response_format: str | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] | None = None
    #: Changes nothing: the body streams anyhow. Only a batch, which does not, looks at it.
    stream: Any = None
    stream_format: str | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    # The peer's. How a voice is cloned is in `speech_reference.py`.
    ref_audio: str | InputAudio | None = None
    ref_text: str | None = None
    references: Annotated[list[ReferenceEntry], Meta(min_length=1, max_length=1)] | None = None
    task_type: str | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=INT_MAX)] | None = None
    # Known, and refused unless they ask for nothing.
    ref_audio_2: Any = None
    speaker_embedding: Any = None
    x_vector_only_mode: Any = None


class SpeechRequest(SpeechFields, kw_only=True):
    input: str
