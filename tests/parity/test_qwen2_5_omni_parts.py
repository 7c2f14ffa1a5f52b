"""Thinker and talker of Qwen2.5-Omni in the `transformers` engine against the library's own `generate`.

A random model of some hundred thousand weights, greedy: token ids and codes are equal, for every kind of prompt, alone
and together, and when a stage starts over after any of its outputs. The library is used as it is, with two precautions
against transformers 5.19: pixels are handed to the thinker alone (`generate` gives them to the talker too, which
refuses them), and the prompt has one position of padding in front, since `generate` drops a mask of ones, and without a
mask the talker leaves out its codec marks and the positions of media.
"""

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniTalkerConfig

from omni_common.errors import OmniError
from omni_common.frames import Codes, Decision, Features, Text
from omni_common.params import Generation
from omni_worker.engine import Arrays, Job, LoadContext, Output, Piece
from omni_worker.engines.autoregressive import Autoregressive

WORDS, WIDTH, CODES = 96, 64, 64
END, PAD, AUDIO, IMAGE, VIDEO, AUDIO_BOS, AUDIO_EOS, VISION_BOS, VISION_EOS = range(83, 92)
TTS_PAD, TTS_BOS, TTS_EOS, OTHER_BOS = range(92, 96)
TOKENS, FRAMES = 10, 40
VOICES = {"Ethan": OTHER_BOS, "Chelsie": TTS_BOS}


# ------------------------------------------------------------------------------------------------------- the model


def tiny_config() -> Qwen2_5OmniConfig:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    marks = {
        "audio_token_index": AUDIO,
        "image_token_index": IMAGE,
        "video_token_index": VIDEO,
        "audio_start_token_id": AUDIO_BOS,
        "audio_end_token_id": AUDIO_EOS,
        "vision_start_token_id": VISION_BOS,
        "vision_end_token_id": VISION_EOS,
    }
    decoder = {"num_hidden_layers": 2, "max_position_embeddings": 4096, "rope_parameters": rope}
    thinker = {
        "text_config": {
            **decoder,
            "vocab_size": WORDS,
            "hidden_size": WIDTH,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "audio_config": {
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "d_model": 32,
            "output_dim": WIDTH,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": [1],
        },
        "eos_token_id": END,
        "pad_token_id": PAD,
        **marks,
    }
    talker = {
        **decoder,
        **marks,
        "vocab_size": CODES + 8,
        "embedding_size": WIDTH,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tts_text_start_token_id": TTS_BOS,
        "tts_text_end_token_id": TTS_EOS,
        "tts_text_pad_token_id": TTS_PAD,
        "tts_codec_pad_token_id": CODES,
        "tts_codec_start_token_id": CODES + 1,
        "tts_codec_end_token_id": CODES + 2,
        "tts_codec_mask_token_id": CODES + 4,
    }
    dit = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "enc_emb_dim": 8,
        "enc_dim": 8,
        "enc_channels": [8, 8, 8, 8, 24],
        "enc_attention_channels": 8,
        "enc_res2net_scale": 2,
        "enc_se_channels": 8,
    }
    token2wav = {"dit_config": dit, "bigvgan_config": {"upsample_initial_channel": 64}}
    return Qwen2_5OmniConfig(thinker_config=thinker, talker_config=talker, token2wav_config=token2wav)


@pytest.fixture(scope="module")
def library() -> Any:
    torch.manual_seed(6)
    build: Any = Qwen2_5OmniForConditionalGeneration
    model = build(tiny_config()).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            loud = "thinker.model" in name or "talker" in name or "head" in name
            parameter.normal_(0, 0.35 if loud else 0.08)
    style = {"cond": torch.zeros(1, 8), "ref_mel": torch.zeros(1, 4, 80)}
    model.speaker_map = {name: {"bos_token": token, **style} for name, token in VOICES.items()}
    return model


@pytest.fixture(scope="module")
def models(library: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of prepared models, with this one as `tiny`."""
    root = tmp_path_factory.mktemp("models")
    folder = root / "tiny"
    for stage in ("thinker", "talker"):
        (folder / stage).mkdir(parents=True)
        weights = getattr(library, stage).state_dict()
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / stage / "model.safetensors")
    library.config.save_pretrained(folder)
    (folder / "speakers.json").write_text(json.dumps({name: {"bos_token": token} for name, token in VOICES.items()}))
    (folder / "processor").mkdir()
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    words.save(str(folder / "processor" / "tokenizer.json"))
    return root


def engine(models: Path, part: str, **options: Any) -> Autoregressive:
    made = Autoregressive()
    options |= {"part": part, "context": options.get("context", 512)}
    made.load(LoadContext("tiny", options, str(models), 8, 1, lambda *_: None, lambda: None))
    return made


@pytest.fixture(scope="module")
def thinker(models: Path) -> Iterator[Autoregressive]:
    made = engine(models, "qwen2_5_omni_thinker")
    yield made
    made.close()


@pytest.fixture(scope="module")
def talker(models: Path) -> Iterator[Autoregressive]:
    made = engine(models, "qwen2_5_omni_talker")
    yield made
    made.close()


# ----------------------------------------------------------------------------------------------------- the prompts


@dataclass
class Asked:
    """A prompt as the preprocessor gives it."""

    ids: list[int] = field(default_factory=list)
    #: By the library's name, a list a medium.
    media: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    sound_in_video: bool = False
    seed: int = 1

    def say(self, *words: int) -> "Asked":
        self.ids += words
        return self

    def _keep(self, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            self.media.setdefault(name, []).append(tensor)
        self.digests.append(blake2b(b"".join(tensor.numpy().tobytes() for tensor in tensors.values())).hexdigest())

    def _random(self, *shape: int) -> torch.Tensor:
        self.seed += 1
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed))

    def image(self, height: int, width: int) -> "Asked":
        """Of height x width merged patches."""
        grid = torch.tensor([[1, 2 * height, 2 * width]])
        self._keep(pixel_values=self._random(4 * height * width, 1176), image_grid_thw=grid)
        return self.say(VISION_BOS, *[IMAGE] * (height * width), VISION_EOS)

    def _heard(self, tokens: int) -> None:
        features, mask = torch.zeros(1, 128, 400), torch.zeros(1, 400, dtype=torch.long)
        features[..., : 4 * tokens], mask[:, : 4 * tokens] = self._random(128, 4 * tokens), 1
        self._keep(input_features=features, feature_attention_mask=mask)

    def audio(self, tokens: int) -> "Asked":
        self._heard(tokens)
        return self.say(AUDIO_BOS, *[AUDIO] * tokens, AUDIO_EOS)

    def _watched(self, frames: int) -> None:
        self._keep(
            pixel_values_videos=self._random(16 * frames, 1176),
            video_grid_thw=torch.tensor([[frames, 4, 4]]),
            video_second_per_grid=torch.tensor([1.0]),
        )

    def video(self, frames: int) -> "Asked":
        """Of pairs of frames, a second each, and 4 tokens."""
        self._watched(frames)
        return self.say(VISION_BOS, *[VIDEO] * (4 * frames), VISION_EOS)

    def sounding_video(self) -> "Asked":
        """4 pairs of frames and 60 tokens of sound, interleaved by 2 seconds: 50 positions."""
        self._watched(4)
        self._heard(60)
        self.sound_in_video = True
        parts = [*[VIDEO] * 8, *[AUDIO] * 50, *[VIDEO] * 8, *[AUDIO] * 10]
        return self.say(VISION_BOS, AUDIO_BOS, *parts, AUDIO_EOS, VISION_EOS)

    def arrays(self) -> Arrays:
        joined = {name: torch.cat(parts).numpy() for name, parts in self.media.items()}
        return {"ids": np.array(self.ids), **joined}


ASKED = {
    "text": Asked().say(*range(3, 30)),
    "image": Asked().say(7, 8, 9).image(2, 3).say(10, 11),
    "audio": Asked().say(7, 8).audio(25).say(12, 13, 14),
    "video": Asked().say(5).video(3).say(6, 7),
    "video with its sound": Asked().say(4, 5).sounding_video().say(20),
    "several": Asked().image(1, 2).say(3).audio(9).image(3, 2).audio(14).say(4).video(2).say(40, 41),
    "a placeholder that is only a word": Asked().say(3, IMAGE, 4, 5, 6, 7).audio(6).say(8),
}
EVERY = list(ASKED)


@dataclass
class Said:
    ids: list[int]
    codes: list[list[int]]
    #: Why text and codes ended.
    finish: tuple[str, str]


def reference(library: Any, asked: Asked, tokens: int, frames: int, voice: str, ends: list[int]) -> Said:
    """What the library's `generate` says, and as `finish` what it stopped at."""
    heard: list[torch.Tensor] = []

    def token2wav(codes: torch.Tensor, **_: Any) -> torch.Tensor:
        heard.append(codes[0])
        return torch.zeros(1)

    library.token2wav.forward = token2wav
    media = {("thinker_" if "pixel" in name else "") + name: torch.cat(kept) for name, kept in asked.media.items()}
    sequences, _ = library.generate(
        input_ids=torch.tensor([[PAD, *asked.ids]]),
        attention_mask=torch.tensor([[0] + [1] * len(asked.ids)]),
        **media,
        use_audio_in_video=asked.sound_in_video,
        speaker=voice,
        thinker_max_new_tokens=tokens,
        thinker_do_sample=False,
        thinker_eos_token_id=ends,
        talker_max_new_tokens=frames,
        talker_do_sample=False,
        talker_eos_token_id=[CODES, CODES + 2],
    )
    ids, codes = sequences[0, 1 + len(asked.ids) :].tolist(), heard[0].tolist()
    ended = "stop" if ids[-1] in ends else "length", "stop" if len(codes) < frames else "length"
    return Said(ids, [[code] for code in codes], ended)


# ------------------------------------------------------------------------------------------------------ the engine


def advance(engine: Autoregressive, outputs: dict[str, list[Output]]) -> None:
    while engine.busy:
        for output in engine.step(set()):
            assert isinstance(output, Output), output
            outputs.setdefault(output.request_id, []).append(output)


def run(engine: Autoregressive, jobs: list[tuple[Job, list[Piece]]]) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    for job, pieces in jobs:
        engine.add(job)
        for piece in pieces:
            engine.push(job.request_id, piece)
    advance(engine, outputs)
    return outputs


def think(
    name: str, asked: Asked, tokens: int = TOKENS, resume: tuple[Decision, ...] = (), stop: tuple[int, ...] = ()
) -> tuple[Job, list[Piece]]:
    params = Generation(max_tokens=tokens, stop_token_ids=list(stop))
    job = Job(name, 7, params, ("preprocessor",), ("client", "talker"), resume=resume)
    return job, [Piece("preprocessor", 0, 1, True, Features(asked.digests, asked.sound_in_video), asked.arrays())]


def talk(
    name: str,
    thought: list[Output],
    frames: int = FRAMES,
    resume: tuple[Decision, ...] = (),
    voice: str = "chelsie",
    **params: Any,
) -> tuple[Job, list[Piece]]:
    seed = int(params.pop("seed", 7))
    wanted = Generation(**{"max_tokens": frames, "voice": voice, "repetition_penalty": 1.05, **params})
    job = Job(name, seed, wanted, ("thinker",), ("code2wav",), resume=resume)
    return job, [Piece("thinker", o.start, o.end, o.last, o.body, o.arrays) for o in of(thought, "talker")]


def of(outputs: list[Output], sink: str) -> list[Output]:
    return [output for output in outputs if output.sinks is None or sink in output.sinks]


def said(thought: list[Output], spoken: list[Output]) -> Said:
    texts = [output.body for output in of(thought, "client")]
    codes = [output.body for output in spoken]
    ids = [token for body in texts if isinstance(body, Text) for token in body.ids]
    frames = [frame for body in codes if isinstance(body, Codes) for frame in body.frames]
    assert isinstance(texts[-1], Text)
    assert isinstance(codes[-1], Codes)
    return Said(ids, frames, (texts[-1].finish, codes[-1].finish))


def decisions(outputs: list[Output]) -> tuple[Decision, ...]:
    return tuple(Decision(output.start, output.end, output.last, output.body) for output in outputs)


# ------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("voice", VOICES)
def test_alone(library: Any, thinker: Autoregressive, talker: Autoregressive, name: str, voice: str) -> None:
    expected = reference(library, ASKED[name], TOKENS, FRAMES, voice, [END])
    thought = run(thinker, [think("a", ASKED[name])])["a"]
    spoken = run(talker, [talk("a", thought, voice=voice)])["a"]
    assert said(thought, spoken) == expected


@pytest.mark.parametrize("names", [EVERY, EVERY[::-1]], ids=["forwards", "backwards"])
def test_together(library: Any, thinker: Autoregressive, talker: Autoregressive, names: list[str]) -> None:
    thoughts = run(thinker, [think(name, ASKED[name]) for name in names])
    speeches = run(talker, [talk(name, thoughts[name]) for name in names])
    finishes = set()
    for name in names:
        expected = reference(library, ASKED[name], TOKENS, FRAMES, "Chelsie", [END])
        assert said(thoughts[name], speeches[name]) == expected, name
        finishes.add(expected.finish[1])
    assert finishes == {"stop", "length"}


def test_the_last_token_of_an_answer_is_not_heard(
    library: Any, thinker: Autoregressive, talker: Autoregressive
) -> None:
    """Neither a stop token nor the one that reached the limit; with two tokens, the first alone is."""
    asked = ASKED["audio"]
    free = reference(library, asked, TOKENS, FRAMES, "Chelsie", [END])
    stop = free.ids[4]
    expected = reference(library, asked, TOKENS, FRAMES, "Chelsie", [END, stop])
    assert expected.finish[0] == "stop"
    thought = run(thinker, [think("a", asked, stop=(stop,))])["a"]
    assert said(thought, run(talker, [talk("a", thought)])["a"]) == expected

    expected = reference(library, asked, 2, FRAMES, "Chelsie", [END])
    thought = run(thinker, [think("a", asked, tokens=2)])["a"]
    assert said(thought, run(talker, [talk("a", thought)])["a"]) == expected


def test_an_answer_of_one_token_is_silent(thinker: Autoregressive, talker: Autoregressive) -> None:
    """The library cannot speak it: there is no token that was heard."""
    thought = run(thinker, [think("a", ASKED["text"], tokens=1)])["a"]
    spoken = run(talker, [talk("a", thought)])["a"]
    assert [(o.start, o.end, o.last, o.body) for o in spoken] == [(0, 0, True, Codes([], "stop"))]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_thinker_resumes_after_every_token(models: Path, thinker: Autoregressive, prefix_cache: bool) -> None:
    asked = ASKED["video with its sound"]
    whole = run(thinker, [think("a", asked)])["a"]
    shown, told = of(whole, "client"), of(whole, "talker")
    other = engine(models, "qwen2_5_omni_thinker", prefill=16, prefix_cache=prefix_cache)
    for count in range(len(shown) + 1):
        again = run(other, [think("a", asked, resume=decisions(shown[:count]))])["a"]
        assert decisions(of(again, "client")) == decisions(shown)
        assert decisions(of(again, "talker")) == decisions(told)
        for one, two in zip(of(again, "talker"), told, strict=True):
            assert one.arrays.keys() == two.arrays.keys()
            for name, array in two.arrays.items():
                np.testing.assert_allclose(one.arrays[name], array, atol=1e-4, rtol=1e-4)
    assert (other.hits > 0) == prefix_cache
    other.close()


@pytest.mark.parametrize("frames", [3, 80])
def test_talker_resumes_after_every_frame(thinker: Autoregressive, talker: Autoregressive, frames: int) -> None:
    thought = run(thinker, [think("a", ASKED["several"])])["a"]
    whole = run(talker, [talk("a", thought, frames)])["a"]
    for count in range(len(whole) + 1):
        again = run(talker, [talk("a", thought, frames, resume=decisions(whole[:count]))])["a"]
        assert decisions(again) == decisions(whole)


@pytest.mark.parametrize("known", [0, 4])
def test_talker_waits_for_text(thinker: Autoregressive, talker: Autoregressive, known: int) -> None:
    """What it says is the same when the text comes a token at a time, and it never runs ahead of it."""
    thought = run(thinker, [think("a", ASKED["image"])])["a"]
    whole = run(talker, [talk("a", thought)])["a"]
    job, pieces = talk("a", thought, resume=decisions(whole[:known]))
    outputs: dict[str, list[Output]] = {}
    talker.add(job)
    for piece in pieces:
        talker.push("a", piece)
        advance(talker, outputs)
        if not piece.last:
            assert len(outputs["a"]) == max(piece.end, known)
    assert decisions(outputs["a"]) == decisions(whole)


def test_talker_stops_at_the_end_of_its_context(models: Path, thinker: Autoregressive) -> None:
    """And does so again when it resumes."""
    asked = ASKED["text"]
    thought = run(thinker, [think("a", asked)])["a"]
    room = 3
    narrow = engine(models, "qwen2_5_omni_talker", context=len(asked.ids) + 2 + room)
    whole = run(narrow, [talk("a", thought)])["a"]
    assert (whole[-1].start, whole[-1].body) == (room + 1, Codes([], "length"))
    for count in range(len(whole) + 1):
        again = run(narrow, [talk("a", thought, resume=decisions(whole[:count]))])["a"]
        assert decisions(again) == decisions(whole)
    narrow.close()


def test_talker_goes_on_when_ends_are_ignored(thinker: Autoregressive, talker: Autoregressive) -> None:
    thought = run(thinker, [think("a", ASKED["several"])])["a"]
    free = run(talker, [talk("a", thought)])["a"]
    assert free[-1].body == Codes([], "stop")
    frames = run(talker, [talk("a", thought, ignore_eos=True)])["a"]
    assert (frames[-1].start, frames[-1].body) == (FRAMES, Codes([], "length"))
    assert decisions(frames)[: len(free) - 1] == decisions(free)[:-1]
    later = run(talker, [talk("a", thought, min_tokens=len(free))])["a"]
    assert len(later) > len(free)


def test_sampled_speech_does_not_depend_on_the_batch(thinker: Autoregressive, talker: Autoregressive) -> None:
    thought = run(thinker, [think("a", ASKED["text"])])["a"]
    jobs = [talk(f"s{seed}", thought, seed=seed, temperature=0.9, top_k=40, top_p=0.8, resume=()) for seed in range(5)]
    alone = [decisions(run(talker, [job])[job[0].request_id]) for job in jobs]
    together = run(talker, jobs)
    assert [decisions(together[job.request_id]) for job, _ in jobs] == alone
    assert len({str(speech) for speech in alone}) == len(alone)


def test_voices(thinker: Autoregressive, talker: Autoregressive) -> None:
    """Names do not mind their case; without one it is the library's default."""
    thought = run(thinker, [think("a", ASKED["image"])])["a"]
    spoken = {name: run(talker, [talk("a", thought, voice=name)])["a"] for name in ("", "Chelsie", "CHELSIE", "ethan")}
    default = inspect.signature(Qwen2_5OmniForConditionalGeneration.generate).parameters["speaker"].default
    assert decisions(spoken[""]) == decisions(spoken[default]) == decisions(spoken["CHELSIE"])
    assert decisions(spoken[""]) != decisions(spoken["ethan"])
    with pytest.raises(OmniError, match="nobody") as raised:
        talker.add(talk("b", thought, voice="nobody")[0])
    assert (raised.value.status, raised.value.param) == (400, "voice")


def test_end_codes_are_those_of_the_library() -> None:
    """`generate` has them as numbers; in a config of the library's own size these are the marks that we end at."""
    config = Qwen2_5OmniTalkerConfig()
    default = inspect.signature(Qwen2_5OmniForConditionalGeneration.generate).parameters["talker_eos_token_id"].default
    assert default == [config.tts_codec_pad_token_id, config.tts_codec_end_token_id]
