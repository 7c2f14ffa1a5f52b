"""The JSON of chat answers, whole and streamed.

Streamed audio has two forms. `openai` (the default): the text of a spoken answer comes as `delta.audio.transcript`, the
sound as `delta.audio.data`, the id once in the first chunk and `expires_at` once in the last before the finish reason;
the `data` of one answer, decoded piece by piece, is one file of the asked format. `content` (what vLLM-Omni's clients
read): text and sound both come as `delta.content`, told apart by the chunk's `modality`, and each piece of sound is a
complete file. It is chosen by the server's `--chat-audio-form`, the header `x-omni-audio-form` or the field
`audio_form`, each over the one before.

Tokens in `usage` are those that the text stage read and wrote, with those that stand for sounds, images and frames in
its prompt where a preprocessor has counted them. Elsewhere the words of heard audio are among those it read, and audio
tokens are added at OpenAI's rate, one for each 100 ms heard; so are, everywhere, one for each 50 ms spoken. Begun ones
count.
"""

import base64
import math
from fractions import Fraction
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from omni_common.frames import PromptFacts
from omni_gateway.chat_split import Called

Finish = Literal["stop", "length", "tool_calls"]
_HEARD_PER_S = 10
_SPOKEN_PER_S = 20


class PromptDetails(msgspec.Struct):
    text_tokens: int
    audio_tokens: int
    image_tokens: int = 0
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    text_tokens: int
    audio_tokens: int
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage(
    read: int, facts: PromptFacts | None, heard_s: Fraction, written: int, reasoning: int, spoken_s: Fraction
) -> Usage:
    """From the text stage's counts, what its preprocessor says of the prompt, and seconds of sound.

    `reasoning` is how many of the `written` tokens were thought.
    """
    if facts is not None:
        prompt = PromptDetails(read - facts.audio_tokens - facts.image_tokens, facts.audio_tokens, facts.image_tokens)
    else:
        prompt = PromptDetails(read, math.ceil(heard_s * _HEARD_PER_S))
        read += prompt.audio_tokens
    spoken = math.ceil(spoken_s * _SPOKEN_PER_S)
    return Usage(
        prompt_tokens=read,
        completion_tokens=written + spoken,
        total_tokens=read + written + spoken,
        prompt_tokens_details=prompt,
        completion_tokens_details=CompletionDetails(written, spoken, reasoning),
    )


class Function(msgspec.Struct):
    name: str
    #: A JSON object, as text.
    arguments: str


class AnswerCall(msgspec.Struct):
    id: str
    function: Function
    #: In streams only.
    index: int | UnsetType = UNSET
    type: str = "function"


class AnswerAudio(msgspec.Struct):
    id: str
    data: str
    expires_at: int
    transcript: str


class AnswerMessage(msgspec.Struct):
    content: str | None
    audio: AnswerAudio | None = None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[AnswerCall] | UnsetType = UNSET
    #: The same under DeepSeek's name and vLLM's.
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class AnswerChoice(msgspec.Struct):
    message: AnswerMessage
    finish_reason: Finish
    index: int = 0
    logprobs: None = None


class Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: Usage
    object: str = "chat.completion"


class DeltaAudio(msgspec.Struct):
    id: str | UnsetType = UNSET
    transcript: str | UnsetType = UNSET
    #: Base64 on the wire.
    data: bytes | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    audio: DeltaAudio | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class DeltaChoice(msgspec.Struct):
    delta: Delta
    finish_reason: Finish | None = None
    index: int = 0
    logprobs: None = None


class Chunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[DeltaChoice]
    #: Null in every chunk but the last when usage was asked for, else absent.
    usage: Usage | UnsetType | None
    modality: str | UnsetType = UNSET
    object: str = "chat.completion.chunk"


class Chunks:
    """Server-sent events of one streamed answer of text; the subclasses add sound."""

    _modality: str | UnsetType = UNSET

    def __init__(self, answer_id: str, created: int, model: str, include_usage: bool) -> None:
        self._head = (answer_id, created, model)
        self._usage: UnsetType | None = None if include_usage else UNSET
        self._encoder = msgspec.json.Encoder()

    def start(self) -> bytes:
        return self._event(Delta(role="assistant", content=""))

    def text(self, piece: str) -> bytes:
        return self._event(Delta(content=piece))

    def thought(self, piece: str) -> bytes:
        return self._event(Delta(reasoning_content=piece, reasoning=piece))

    def called(self, id_: str, call: Called) -> bytes:
        return self._event(Delta(tool_calls=[AnswerCall(id_, Function(call.name, call.arguments), call.index)]))

    def sound(self, data: bytes) -> bytes:
        """One piece of encoded audio."""
        raise AssertionError("an answer of text has no sound")

    def sounded(self, expires_at: int) -> bytes:
        """After the last piece of sound."""
        return b""

    def end(self, finish: Finish, counted: Usage) -> bytes:
        """The finish reason, the usage if it was asked for, and the end mark."""
        frames = self._frame([DeltaChoice(Delta(), finish)], self._usage, self._modality)
        if self._usage is None:
            frames += self._frame([], counted, UNSET)
        return frames + b"data: [DONE]\n\n"

    def _event(self, delta: Delta, modality: str | UnsetType = UNSET) -> bytes:
        return self._frame([DeltaChoice(delta)], self._usage, modality)

    def _frame(self, choices: list[DeltaChoice], counted: Usage | UnsetType | None, modality: str | UnsetType) -> bytes:
        return b"data: " + self._encoder.encode(Chunk(*self._head, choices, counted, modality)) + b"\n\n"


class SpokenChunks(Chunks):
    """OpenAI's form of a spoken answer."""

    def __init__(self, answer_id: str, created: int, model: str, include_usage: bool, audio_id: str) -> None:
        super().__init__(answer_id, created, model, include_usage)
        self._audio_id = audio_id

    def start(self) -> bytes:
        return self._event(Delta(role="assistant", audio=DeltaAudio(id=self._audio_id)))

    def text(self, piece: str) -> bytes:
        return self._event(Delta(audio=DeltaAudio(transcript=piece)))

    def sound(self, data: bytes) -> bytes:
        return self._event(Delta(audio=DeltaAudio(data=data)))

    def sounded(self, expires_at: int) -> bytes:
        return self._event(Delta(audio=DeltaAudio(expires_at=expires_at)))


class ContentChunks(Chunks):
    """The peer's form of a spoken answer; `with_text` is false when only audio was asked for."""

    def __init__(self, answer_id: str, created: int, model: str, include_usage: bool, with_text: bool) -> None:
        super().__init__(answer_id, created, model, include_usage)
        self._with_text = with_text
        self._modality = "audio"

    def start(self) -> bytes:
        return self._event(Delta(role="assistant", content=""), "text" if self._with_text else "audio")

    def text(self, piece: str) -> bytes:
        return self._event(Delta(content=piece), "text") if self._with_text else b""

    def sound(self, data: bytes) -> bytes:
        return self._event(Delta(content=base64.b64encode(data).decode()), "audio")
