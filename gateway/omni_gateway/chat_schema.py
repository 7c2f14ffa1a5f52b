"""The body of `POST /v1/chat/completions`, as OpenAI's clients and the peer's send it.

Unknown fields are ignored, as OpenAI ignores them, but fields that are known to change the answer and that no pipeline
here can honour are refused by name.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_common.errors import invalid
from omni_common.frames import Params
from omni_common.params import BIAS_MOST, BIASES
from omni_gateway.errors import quoted

#: Token id -> what is added to its score.
LogitBias = dict[str, float]
ChatFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"]
_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
#: Far more than a context or a decoder takes; each costs time before anything else refuses it.
_MESSAGES = 2048
_PARTS = 256


class InputAudio(msgspec.Struct):
    #: Base64 of a whole file.
    data: str
    #: Checked for being an audio format; the decoder looks at the bytes.
    format: str | None = None


class MediaUrl(msgspec.Struct):
    #: `http:`, `https:` or `data:`.
    url: str
    #: For images; `low` is seen at 512 x 512 pixels or so.
    detail: Literal["auto", "low", "high", "original"] | None = None


class Part(msgspec.Struct):
    """A content part of any type; what it must hold by type is checked in `chat_read.py`, where its path is known."""

    type: str
    text: str | None = None
    input_audio: InputAudio | None = None
    #: OpenAI has an object here, the peer's clients also the bare URL.
    image_url: str | MediaUrl | None = None
    video_url: str | MediaUrl | None = None
    audio_url: str | MediaUrl | None = None


class AudioRef(msgspec.Struct):
    """An earlier answer's audio, by the id that it was given."""

    id: str


class ChatMessage(msgspec.Struct):
    role: str
    content: str | Annotated[list[Part], Meta(max_length=_PARTS)] | None = None
    audio: AudioRef | None = None
    tool_calls: Any = None
    function_call: Any = None


class VoiceRef(msgspec.Struct):
    id: str


class AudioOptions(msgspec.Struct):
    format: ChatFormat | None = None
    voice: str | VoiceRef | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class MediaOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Other keys change what a model sees; the pipeline's limits decide that here."""

    use_audio_in_video: bool | None = None


class ChatRequest(msgspec.Struct, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=_MESSAGES)]
    model: str | None = None
    modalities: list[str] | None = None
    audio: AudioOptions | None = None
    #: The peer's place for the voice; `audio.voice` goes first.
    voice: str | None = None
    #: How streamed audio is laid out in this answer; a switch of ours, see `chat_wire.py`.
    audio_form: Literal["openai", "content"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    sampling_params_list: list[dict[str, Any] | None] | None = None
    #: Videos are heard too; where the peer's clients say so is `mm_processor_kwargs`.
    use_audio_in_video: bool | None = None
    mm_processor_kwargs: MediaOptions | None = None
    # Sampling, for the stage that writes the text. Ranges are the engine's, in omni_common.params.
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    min_tokens: _Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Int64 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_Int64] | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias | None = None
    seed: _Int64 | None = None
    # Known, and refused unless they ask for nothing.
    n: Any = None
    best_of: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    prompt_logprobs: Any = None
    web_search_options: Any = None
    media_io_kwargs: Any = None

    @property
    def hears_videos(self) -> bool:
        if self.use_audio_in_video is not None:
            return self.use_audio_in_video
        options = self.mm_processor_kwargs
        return bool(options is not None and options.use_audio_in_video)

    def sampling(self) -> Params:
        """The sampling parameters that the request sets, under the engine's names."""
        names = (
            "min_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
            "repetition_penalty", "stop_token_ids", "ignore_eos",
        )  # fmt: skip
        params: Params = {name: value for name in names if (value := getattr(self, name)) is not None}
        limit = self.max_completion_tokens or self.max_tokens
        if limit is not None:
            params["max_tokens"] = limit
        if self.stop is not None:
            stop: list[str | int] = [self.stop] if isinstance(self.stop, str) else list(self.stop)
            if "" in stop:
                raise invalid("stop: a stop string must not be empty", "stop")
            params["stop"] = stop
        if self.logit_bias:
            params["logit_bias"] = bias_entries(self.logit_bias, "logit_bias")
        return params


def bias_entries(biases: dict[str, float], where: str) -> list[str | int]:
    """`logit_bias` as a parameter, see `omni_common.params`. Raises OmniError 400 for what is no id or no bias."""
    if len(biases) > BIASES:
        raise invalid(f"{where} has more than {BIASES} entries", where)
    for id_, bias in biases.items():
        if not (id_.isascii() and id_.isdecimal() and len(id_) <= 10):
            raise invalid(f"{where}: {quoted(id_)} is no token id", where)
        if not abs(bias) <= BIAS_MOST:
            raise invalid(f"{where}: the bias of {id_} is not from -{BIAS_MOST:g} to {BIAS_MOST:g}", where)
    return [f"{id_}:{float(bias):.6f}" for id_, bias in biases.items()]


#: Field -> the values that ask for nothing, and may therefore stand there.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "web_search_options": (),
    "media_io_kwargs": ({},),
}


def refuse_unsupported(request: ChatRequest) -> None:
    """Raises OmniError 400 naming the field, for what would change the answer and cannot be done."""
    for name, harmless in _HARMLESS.items():
        value = getattr(request, name)
        if value is not None and not any(type(value) is type(h) and value == h for h in harmless):
            raise invalid(f"{name} is not supported here", name, code="unsupported_parameter")
    for index, message in enumerate(request.messages):
        where = f"messages[{index}]"
        if message.role not in ("system", "developer", "user", "assistant"):
            text = f"{where}.role: {quoted(message.role)} is not supported; use system, developer, user or assistant"
            raise invalid(text, f"{where}.role")
        for name in ("tool_calls", "function_call"):
            if getattr(message, name):
                raise invalid(f"{where}.{name} is not supported here", f"{where}.{name}", code="unsupported_parameter")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is only allowed with stream: true", "stream_options")
