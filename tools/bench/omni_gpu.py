"""Qwen3-Omni-30B-A3B's dimensions with random weights on one CUDA device: the engines in this process, without the bus.

`python -m tools.bench.omni_gpu [--tiny] [--json FILE]`; `--tiny` shows on a CPU that it runs. What is measured: tokens
a second of the thinker, time a frame of the talker (with the code predictor), and one stream through all three stages
in turn: real-time factor and time to the first sound.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import Qwen3OmniMoeConfig

from omni_common.frames import Codes, Features
from omni_common.params import Generation, Voiced
from omni_worker.engine import Engine, Job, LoadContext, Output, Piece
from omni_worker.engines.autoregressive import Autoregressive
from omni_worker.engines.codec import Codec

PROMPT, ANSWER, FRAMES = 100, 64, 150


def config(tiny: bool) -> Qwen3OmniMoeConfig:
    """The published dimensions, or small ones of the same shape."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    mrope = rope | {"mrope_section": [24, 20, 20], "interleaved": True, "mrope_interleaved": True}
    ids = {
        "audio_token_id": 151675,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "audio_start_token_id": 151669,
    }
    text = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    text |= {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    text |= {"vocab_size": 152064, "norm_topk_prob": True, "rope_parameters": mrope, "max_position_embeddings": 65536}
    talk = {"hidden_size": 1024, "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 2}
    talk |= {"head_dim": 128, "moe_intermediate_size": 384, "num_experts": 128, "num_experts_per_tok": 6}
    talk |= {"shared_expert_intermediate_size": 768, "vocab_size": 3072, "rope_parameters": mrope}
    predictor = {"hidden_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 16, "num_key_value_heads": 8}
    predictor |= {"head_dim": 128, "intermediate_size": 3072, "vocab_size": 2048, "num_code_groups": 16}
    predictor |= {"rope_parameters": rope}
    wave: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    if tiny:
        for part in (text, talk):
            part |= {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 128}
        predictor |= {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128}
        wave |= {"hidden_size": 64, "num_hidden_layers": 1, "decoder_dim": 64, "num_attention_heads": 2}
        wave |= {"num_key_value_heads": 2, "intermediate_size": 64}
    talker = {
        "code_predictor_config": predictor,
        "text_config": talk,
        "num_code_groups": 16,
        "thinker_hidden_size": text["hidden_size"],
        "accept_hidden_layer": 2 if tiny else 24,
        "codec_eos_token_id": 2150,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "speaker_id": {"ethan": 2302},
        "spatial_merge_size": 2,
    } | ids
    vision = {"depth": 1, "deepstack_visual_indexes": [0], "out_hidden_size": text["hidden_size"]}
    thinker = {"text_config": text, "vision_config": vision, "user_token_id": 872} | ids
    return Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=talker,
        code2wav_config=wave,
        im_start_token_id=151644,
        im_end_token_id=151645,
        tts_pad_token_id=151671,
        tts_bos_token_id=151672,
        tts_eos_token_id=151673,
        system_token_id=8948,
        user_token_id=872,
        assistant_token_id=77091,
    )


def prompt(number: int) -> np.ndarray[Any, Any]:
    """A user's turn of random words, and the beginning of the answer: int64 [PROMPT]."""
    words = np.random.default_rng(number).integers(1000, 100_000, PROMPT - 8)
    return np.concatenate([[151644, 872, 198], words, [151645, 198], [151644, 77091, 198]])


class Bench:
    """Engines by stage, and what they put out."""

    def __init__(self, tiny: bool, slots: int, device: dict[str, Any]) -> None:
        self.engines: dict[str, Engine] = {}
        self.loaded_s: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            config(tiny).save_pretrained(folder)
            (folder / "processor").mkdir()
            words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
            words.save(str(folder / "processor" / "tokenizer.json"))
            for stage, engine, options in (
                ("thinker", Autoregressive(), {"part": "qwen3_omni_thinker", "context": 1024}),
                ("talker", Autoregressive(), {"part": "qwen3_omni_talker", "context": 1024}),
                ("code2wav", Codec(), {"part": "qwen3_omni_code2wav"}),
            ):
                began = time.perf_counter()
                both = {**options, **device, "weights": "random"}
                engine.load(LoadContext("model", both, temporary, slots, 8, lambda *_: None, lambda: None))
                self.loaded_s[stage] = time.perf_counter() - began
                self.engines[stage] = engine

    def think(self, name: str, number: int, tokens: int, sinks: tuple[str, ...]) -> None:
        params = Generation(max_tokens=tokens, min_tokens=tokens)
        self.engines["thinker"].add(Job(name, number, params, ("preprocessor",), sinks))
        self.engines["thinker"].push(name, Piece("preprocessor", 0, 1, True, Features(), {"ids": prompt(number)}))

    def talk(self, name: str, number: int, frames: int) -> None:
        params = Generation(max_tokens=frames + 1, min_tokens=frames + 1, repetition_penalty=1.05)
        self.engines["talker"].add(Job(name, number, params, ("thinker",), ("code2wav",)))

    def step(self, stage: str) -> list[Output]:
        outputs = self.engines[stage].step(set())
        assert all(isinstance(output, Output) for output in outputs), outputs
        return outputs  # type: ignore[return-value]

    def pass_on(self, source: str, target: str, outputs: list[Output]) -> None:
        for output in outputs:
            if output.sinks is None or target in output.sinks:
                piece = Piece(source, output.start, output.end, output.last, output.body, output.arrays)
                self.engines[target].push(output.request_id, piece)

    def drain(self, stage: str, until: Callable[[], bool] = lambda: False) -> list[Output]:
        outputs: list[Output] = []
        while self.engines[stage].busy and not until():
            outputs += self.step(stage)
        return outputs


def thinker_rate(bench: Bench, streams: int, tokens: int) -> float:
    """Tokens a second of `streams` answers together, their prompts not counted."""
    for number in range(streams):
        bench.think(f"t{number}", number, tokens, ("client",))
    count, began = 0, 0.0
    started: set[str] = set()
    while bench.engines["thinker"].busy:
        outputs = bench.step("thinker")
        started |= {output.request_id for output in outputs}
        if not began and len(started) == streams:
            began = time.perf_counter()
        elif began:
            count += len(outputs)
    return count / (time.perf_counter() - began)


def frame_time(bench: Bench, streams: int, frames: int) -> float:
    """Milliseconds of a step in which every stream gets a frame."""
    for number in range(streams):
        bench.think(f"f{number}", number, 8, ("talker",))
    thought = bench.drain("thinker")
    for number in range(streams):
        bench.talk(f"f{number}", number, frames + streams)
    bench.pass_on("thinker", "talker", thought)
    times = []
    while bench.engines["talker"].busy:
        began = time.perf_counter()
        outputs = bench.step("talker")
        # All of them speak: the first have begun, the last have not ended.
        if len(outputs) >= streams:
            times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e3


def one_stream(bench: Bench, number: int) -> dict[str, float]:
    """A spoken answer; the stages take turns on the device, the text only as far as it is needed first."""
    name = f"s{number}"
    began = time.perf_counter()
    bench.think(name, number, ANSWER, ("talker",))
    bench.talk(name, number, FRAMES)
    bench.engines["code2wav"].add(Job(name, number, Voiced(), ("talker",), ("client",)))
    first = text = 0.0
    samples = frames = 0
    while any(engine.busy for engine in bench.engines.values()):
        if bench.engines["thinker"].busy:
            bench.pass_on("thinker", "talker", bench.step("thinker"))
            text = time.perf_counter() - began
        if bench.engines["talker"].busy:
            spoken = bench.step("talker")
            frames += sum(len(o.body.frames) for o in spoken if isinstance(o.body, Codes))
            bench.pass_on("talker", "code2wav", spoken)
        if bench.engines["code2wav"].busy:
            for output in bench.step("code2wav"):
                samples += len(output.arrays.get("samples", ()))
                first = first or time.perf_counter() - began
    total = time.perf_counter() - began
    audio = samples / 24_000
    figures = {"total_s": total, "text_s": text, "first_audio_s": first, "audio_s": audio, "rtf": total / audio}
    return figures | {"frames": float(frames)}


def without_graphs(bench: Bench) -> bool:
    """Whether steps that are launched one kernel at a time give the same tokens and codes as recorded ones."""
    thinker, talker = bench.engines["thinker"], bench.engines["talker"]
    found = []
    for graphs in (True, False):
        held: list[Any] = [thinker._graphs, talker._graphs, talker._model.predictor._graphs]  # type: ignore[attr-defined]
        if not graphs:
            thinker._graphs = talker._graphs = talker._model.predictor._graphs = None  # type: ignore[attr-defined]
        bench.think("g", 1, 24, ("talker",))
        thought = bench.drain("thinker")
        bench.talk("g", 1, 24)
        bench.pass_on("thinker", "talker", thought)
        found.append(([output.body for output in thought], [output.body for output in bench.drain("talker")]))
        thinker._graphs, talker._graphs, talker._model.predictor._graphs = held  # type: ignore[attr-defined]
    return found[0] == found[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--experts", help="transformers' implementation: eager, batched_mm, grouped_mm")
    arguments = parser.parse_args()
    tiny: bool = arguments.tiny
    found: dict[str, Any] = {"torch": torch.__version__, "tiny": tiny}
    device: dict[str, Any] = {"device": "cpu"} if tiny else {"device": "cuda", "dtype": "bfloat16"}
    if not tiny:
        # In float32, where a tie between two tokens is not decided by how sums are cut.
        found["equal_without_graphs"] = without_graphs(Bench(True, 4, {"device": "cuda"}))
        print("without graphs the same:", found["equal_without_graphs"], flush=True)
    if arguments.experts:
        device["experts"] = arguments.experts
    bench = Bench(tiny, 4 if tiny else 64, device)
    found["loaded_s"] = bench.loaded_s
    for number in range(3):
        found[f"stream_{number}"] = one_stream(bench, number)
        print(json.dumps(found[f"stream_{number}"]), flush=True)
    for streams in (1, 2) if tiny else (1, 8, 64):
        for _ in range(2):
            found[f"thinker_tokens_per_s_{streams}"] = thinker_rate(bench, streams, 16 if tiny else 128)
            found[f"talker_frame_ms_{streams}"] = frame_time(bench, streams, 8 if tiny else 60)
        print(streams, found[f"thinker_tokens_per_s_{streams}"], found[f"talker_frame_ms_{streams}"], flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=2))
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
