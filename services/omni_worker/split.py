"""`python -m omni_worker.split SOURCE TARGET`: a checkpoint of a multi-stage model, cut into a folder a stage.

SOURCE is loaded whole by transformers' own loader, so that whatever it renames or fuses is right; every weight must be
there and none may be left over. TARGET gets `config.json`, `processor/` (tokenizer, processor, chat template), a folder
a stage with its weights under the names that its module has, the speakers, and `manifest.json`. It is written beside
and renamed when complete. Takes as much memory as the checkpoint has bytes.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from omni_worker.torchvision_shim import declare_ops

declare_ops()

import msgspec  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from omni_common.checkpoint import MANIFEST, Manifest, bad_checkpoint, family_of, look_at  # noqa: E402
from omni_common.errors import OmniError  # noqa: E402
from omni_common.orphan import end_with_parent  # noqa: E402

#: By family: transformers' class, and the stages, folder and attribute.
KINDS = {
    "qwen3_omni": (
        "Qwen3OmniMoeForConditionalGeneration",
        {"thinker": "thinker", "talker": "talker", "code2wav": "code2wav"},
    ),
    "qwen2_5_omni": (
        "Qwen2_5OmniForConditionalGeneration",
        {"thinker": "thinker", "talker": "talker", "code2wav": "token2wav"},
    ),
}
SHARD_BYTES = 4 << 30
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def split(source: Path, target: Path) -> None:
    """Raises OmniError that says what is wrong with the checkpoint."""
    family = family_of(source)
    kind, stages = KINDS[family]
    # As it is before it is read: what changes meanwhile is then found to differ.
    read = look_at(source)
    # Of the base class: a family's own may not know how to tell what it found.
    base: Any = transformers.PreTrainedModel.from_pretrained
    settings = {"local_files_only": True, "dtype": "auto", "output_loading_info": True}
    # What does not fit is in the report, and refused below with the rest.
    settings["ignore_mismatched_sizes"] = True
    model, report = base.__func__(getattr(transformers, kind), source, **settings)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found := sorted(map(str, report[what])):
            raise bad_checkpoint(f"{len(found)} {what.replace('_', ' ')}, first {found[0]}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        files = {folder: _save(getattr(model, name), made / folder) for folder, name in stages.items()}
        speakers = _speakers(model, source, made)
        model.config.save_pretrained(made)
        model.generation_config.save_pretrained(made)
        _copy_processor(source, made / "processor")
        manifest = Manifest(
            family=family,
            source=read,
            dtype=str(model.dtype).removeprefix("torch."),
            stages=files,
            speakers=speakers,
            versions={"torch": str(torch.__version__), "transformers": transformers.__version__},
        )
        (made / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        os.rename(made, target)


def _save(module: torch.nn.Module, folder: Path) -> dict[str, int]:
    """The module's parameters and persistent buffers; returns the bytes of each file."""
    folder.mkdir()
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in module.state_dict().items():
        if size and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        # Of their own, so that names which share memory are all written.
        shards[-1][name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        size += tensor.nbytes
    sizes = {}
    for number, shard in enumerate(shards, 1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(shard, path)
        sizes[path.name] = path.stat().st_size
    return sizes


def _speakers(model: Any, source: Path, made: Path) -> list[str]:
    """Names of the voices. What a voice needs beside a token is written beside the stages."""
    ids = getattr(model.config.talker_config, "speaker_id", None)
    if ids:
        return sorted(ids)
    path = source / "spk_dict.pt"
    try:
        voices: dict[str, dict[str, Any]] = torch.load(path, map_location="cpu", weights_only=True)
        tokens = {name: {"bos_token": int(voice["bos_token"])} for name, voice in voices.items()}
        tensors = {
            f"{name}.{part}": voice[part].float().contiguous()
            for name, voice in voices.items()
            for part in ("cond", "ref_mel")
        }
    except Exception as error:
        # Of whatever kind: torch refuses in its own ways what is more than tensors.
        raise bad_checkpoint(f"{path} cannot be read as voices: {str(error).splitlines()[0]}") from None
    (made / "speakers.json").write_text(json.dumps(tokens, indent=2) + "\n")
    # Not `*.safetensors` of the stage: these are no weights of the module.
    _write(tensors, made / "speakers.safetensors")
    return sorted(voices)


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path)
    # It makes files that only their owner may read; the workers may be another user's.
    path.chmod(0o644)


def _copy_processor(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHTS) and path.name != "config.json":
            shutil.copyfile(path, target / path.name)
    if not (target / "tokenizer.json").exists():
        # Older checkpoints have its parts only.
        transformers.AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(target)
    # The processor's class may stand nowhere else.
    shutil.copyfile(source / "config.json", target / "config.json")


def main() -> int:
    end_with_parent()
    parser = argparse.ArgumentParser(prog="omni_worker.split", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        split(arguments.source, arguments.target)
    except OmniError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
