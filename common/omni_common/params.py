"""Per-request parameters of a stage, typed by the kind of its engine.

The YAML's `params:` of a stage, `--set stages.X.params.Y=`, `sampling_params_list` and the request's own fields all
end in one of these structs, so a wrong key or range is refused in one place, before anything is placed. Precedence:
YAML < platform overlay < global flags < `--set` < request.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from omni_common.errors import invalid
from omni_common.frames import Params

#: What every engine's C side can hold.
INT_MAX = 2**31 - 1
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
#: Far longer than what ends an answer; each is looked for in every piece of text.
STOP_CHARS = 256
VoiceName = Annotated[str, Meta(max_length=128)]
#: `ID:BIAS`: parameters hold no mappings.
Bias = Annotated[str, Meta(pattern=r"^[0-9]{1,10}:-?[0-9]{1,3}(\.[0-9]{1,20})?$", max_length=36)]
#: Of one request, as OpenAI has it.
BIASES = 300
BIAS_MOST = 100.0


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Autoregressive text. Temperature 0 is greedy."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 0.0
    top_p: Probability = 1.0
    #: 0 or -1: off.
    top_k: Annotated[int, Meta(ge=-1, le=INT_MAX)] = 0
    min_p: Probability = 0.0
    max_tokens: Annotated[int, Meta(ge=1, le=INT_MAX)] = 256
    min_tokens: Annotated[int, Meta(ge=0, le=INT_MAX)] = 0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=2.0)] = 1.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    stop: Annotated[list[Annotated[str, Meta(max_length=STOP_CHARS)]], Meta(max_length=16)] = []
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0, le=INT_MAX)]], Meta(max_length=1024)] = []
    #: What is added to the scores of tokens before anything is chosen; see `biases`.
    logit_bias: Annotated[list[Bias], Meta(max_length=BIASES)] = []
    ignore_eos: bool = False
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` by token id."""
        return {int(id_): float(bias) for id_, _, bias in (entry.partition(":") for entry in self.logit_bias)}


def check_biases(params: Sampling, vocabulary: int) -> None:
    """Raises OmniError 400 for a bias of an id that a model of so many tokens has not."""
    for id_ in params.biases:
        if id_ >= vocabulary:
            raise invalid(f"logit_bias: {id_} is no token; the model has the ids 0 to {vocabulary - 1}", "logit_bias")


class Generation(Sampling, kw_only=True, forbid_unknown_fields=True):
    """Autoregressive text, or the codes of a voice."""

    #: Only for stages that speak.
    voice: VoiceName = ""


class Voiced(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The decoding of a voice's codes."""

    voice: VoiceName = ""


class Recognition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Speech to text."""

    #: ISO 639-1, empty: the model's own language or a guess.
    language: str = ""
    #: Words that the audio is likely to hold; conditions the decoder.
    prompt: str = ""
    temperature: Probability = 0.0
    #: Ask for word or segment times.
    timestamps: bool = False


class Speech(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Text to speech, and the decoding of its latents."""

    voice: VoiceName = ""
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] = 1.0


#: Speeds that the speech stages speak at themselves; beyond them the gateway stretches the sound.
NATIVE_SPEED = (0.5, 2.0)


def split_speed(speed: float) -> tuple[float, float]:
    """(what the talker does itself, the factor that is left to a time stretcher); their product is `speed`."""
    native = min(max(speed, NATIVE_SPEED[0]), NATIVE_SPEED[1])
    return native, speed / native


class NoParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A stage that takes no parameters."""


AnyParams = Sampling | Generation | Recognition | Speech | Voiced | NoParams

#: Which struct an engine's parameters are. Names are those of `engine:` in a pipeline file.
BY_ENGINE: dict[str, type[AnyParams]] = {
    "llamacpp": Sampling,
    "recogniser": Recognition,
    "onnx": Speech,
    "processor": NoParams,
    "transformers": Generation,
    "vllm": Generation,
    "codec": Voiced,
    "fake": Sampling,
}


def check_params(engine: str, params: Params, where: str) -> AnyParams:
    """Return `params` as the engine's struct.

    Raises OmniError 400 whose `param` is `where` plus the offending key.
    """
    kind = BY_ENGINE.get(engine, NoParams)
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        path = text.rpartition("at `$")[2].rstrip("`") if "at `$" in text else ""
        if "unknown field" in text:
            path = "." + text.split("`")[1]
        raise invalid(f"{where}{path}: {text.split(' - at')[0]}", where + path) from None
