"""All weights of a stage are read, or it is refused: on a small module, and on the stages of the real families."""

import runpy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from omni_worker.torchvision_shim import declare_ops

declare_ops()

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as qwen2_5  # noqa: E402
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as qwen3  # noqa: E402

from omni_common.errors import OmniError  # noqa: E402
from omni_worker.weights import load_stage  # noqa: E402

TOOL = Path(__file__).parents[3] / "tools" / "make_tiny_models.py"
CPU = torch.device("cpu")
#: By family: the library's class, and by stage the attribute, the part of its configuration and the class.
Stages = dict[str, tuple[str, str, Callable[[Any], nn.Module]]]
FAMILIES: dict[str, tuple[Any, Stages]] = {
    "qwen3_omni": (
        qwen3.Qwen3OmniMoeForConditionalGeneration,
        {
            "thinker": ("thinker", "thinker_config", qwen3.Qwen3OmniMoeThinkerForConditionalGeneration),
            "talker": ("talker", "talker_config", qwen3.Qwen3OmniMoeTalkerForConditionalGeneration),
            "code2wav": ("code2wav", "code2wav_config", qwen3.Qwen3OmniMoeCode2Wav),
        },
    ),
    "qwen2_5_omni": (
        qwen2_5.Qwen2_5OmniForConditionalGeneration,
        {
            "thinker": ("thinker", "thinker_config", qwen2_5.Qwen2_5OmniThinkerForConditionalGeneration),
            "talker": ("talker", "talker_config", qwen2_5.Qwen2_5OmniTalkerForConditionalGeneration),
            "code2wav": ("token2wav", "token2wav_config", qwen2_5.Qwen2_5OmniToken2WavModel),
        },
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------------ a small module


class Small(nn.Module):
    """One of each kind that a stage has: weights, tied ones, a buffer that is saved and one that is computed."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.zeros(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("frequencies", torch.arange(3, dtype=torch.float32) + 0.25, persistent=False)


def weights() -> dict[str, Tensor]:
    embed = torch.arange(20.0).reshape(5, 4) / 3
    return {
        "embed.weight": embed,
        "head.weight": embed.clone(),
        "norm.weight": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "norm.bias": torch.tensor([0.1, 0.2, 0.3, 0.4]),
        "scale": torch.tensor([5.0, 6.0]),
        "steps": torch.tensor(7),
    }


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def save(*shards: dict[str, Tensor]) -> Path:
        folder = tmp_path / "talker"
        folder.mkdir(exist_ok=True)
        for number, shard in enumerate(shards):
            save_file(shard, folder / f"model-{number}.safetensors")
        return tmp_path

    return save


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_stage(folder, "talker", Small, dtype, CPU)


def refusal(folder: Path) -> str:
    with pytest.raises(OmniError) as caught:
        load(folder)
    assert caught.value.code == "bad_checkpoint"
    assert "talker" in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("shards", [1, 2, 6])
def test_every_weight_is_read(save: Callable[..., Path], shards: int) -> None:
    given = weights()
    names = list(given)
    module = load(save(*({name: given[name] for name in names[number::shards]} for number in range(shards))))
    found = module.state_dict()
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
    assert module.head.weight is module.embed.weight
    assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())


def test_weights_take_the_dtype_and_what_is_computed_keeps_its_own(save: Callable[..., Path]) -> None:
    module = load(save(weights()), torch.bfloat16)
    assert torch.equal(module.embed.weight, weights()["embed.weight"].bfloat16())
    assert module.norm.bias.dtype == torch.bfloat16
    assert module.steps.dtype == torch.long and module.steps == 7
    assert torch.equal(module.frequencies, torch.tensor([0.25, 1.25, 2.25]))
    assert torch.get_default_dtype() == torch.float32


def test_a_weight_that_is_missing_is_named(save: Callable[..., Path]) -> None:
    given = weights()
    del given["norm.bias"]
    assert "1 weights are missing, first norm.bias" in refusal(save(given))


def test_a_buffer_that_is_missing_is_named(save: Callable[..., Path]) -> None:
    given = weights()
    del given["scale"]
    assert "first scale" in refusal(save(given))


@pytest.mark.parametrize("name", ["norm.gain", "frequencies"])
def test_a_weight_that_the_model_has_not_is_named(save: Callable[..., Path], name: str) -> None:
    assert f"has {name}, which the model has not" in refusal(save(weights() | {name: torch.zeros(3)}))


def test_a_weight_that_comes_twice_is_named(save: Callable[..., Path]) -> None:
    assert "model-1.safetensors has scale" in refusal(save(weights(), {"scale": torch.zeros(2)}))


@pytest.mark.parametrize("shape", [(4, 5), (5, 3), (20,), (1, 5, 4)])
def test_a_wrong_shape_is_named(save: Callable[..., Path], shape: tuple[int, ...]) -> None:
    message = refusal(save(weights() | {"embed.weight": torch.zeros(shape)}))
    assert f"embed.weight is {[*shape]}, not [5, 4]" in message


def test_one_number_is_not_spread_over_a_weight(save: Callable[..., Path]) -> None:
    assert "scale is [1], not [2]" in refusal(save(weights() | {"scale": torch.zeros(1)}))


@pytest.mark.parametrize(("name", "dtype"), [("embed.weight", torch.int8), ("steps", torch.float32)])
def test_whole_numbers_are_not_taken_for_floats_nor_floats_for_them(
    save: Callable[..., Path], name: str, dtype: torch.dtype
) -> None:
    given = weights()
    given[name] = given[name].to(dtype)
    assert f"{name} is of {dtype}" in refusal(save(given))


def test_no_weights_at_all(tmp_path: Path) -> None:
    assert "no safetensors in" in refusal(tmp_path)
    (tmp_path / "talker").mkdir()
    torch.save(weights(), tmp_path / "talker" / "pytorch_model.bin")
    assert "no safetensors in" in refusal(tmp_path)


@pytest.mark.parametrize("length", [0, 4, 40, -1])
def test_a_file_that_was_cut_short_is_named(save: Callable[..., Path], length: int) -> None:
    folder = save(weights())
    file = folder / "talker" / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    assert "model-0.safetensors cannot be read" in refusal(folder)


def test_weights_are_not_initialised_first(save: Callable[..., Path]) -> None:
    """Random numbers for 30 billion weights take minutes, and are then thrown away."""
    folder, before = save(weights()), torch.get_rng_state()
    load(folder)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_was_set_for_building_is_undone_when_that_fails(save: Callable[..., Path]) -> None:
    def build() -> nn.Module:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        load_stage(save(weights()), "talker", build, torch.bfloat16, CPU)
    assert torch.get_default_dtype() == torch.float32
    assert nn.Linear(3, 3).weight.std() > 0


def test_random_weights_are_only_had_by_asking(tmp_path: Path) -> None:
    module = load_stage(tmp_path, "talker", Small, torch.float32, CPU, random=True)
    assert module.embed.weight.std() > 0
    assert torch.equal(module.norm.weight, torch.ones(4)) and torch.equal(module.norm.bias, torch.zeros(4))


# --------------------------------------------------------------------------------------------------- the real families


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        # The compiler's folder, made when a model is; nothing is compiled.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        make = runpy.run_path(str(TOOL))["make"]
        for family in FAMILIES:
            make(family, folder)
        yield folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_is_what_the_library_has_of_it(
    family: str, dtype: torch.dtype, checkpoints: Path, tmp_path: Path
) -> None:
    """Also in what no file has, such as frequencies and filters."""
    kind, stages = FAMILIES[family]
    whole = kind.from_pretrained(checkpoints / f"{family}_tiny", dtype=dtype)
    for stage, (attribute, part, build) in stages.items():
        expected = getattr(whole, attribute)
        (tmp_path / stage).mkdir()
        save_file({n: t.clone() for n, t in expected.state_dict().items()}, tmp_path / stage / "model.safetensors")
        config = getattr(whole.config, part)
        # The library has this one in float32, whatever is asked for.
        kept = torch.float32 if attribute == "token2wav" else dtype
        made = load_stage(tmp_path, stage, partial(build, config), kept, CPU)
        for what in ("named_parameters", "named_buffers"):
            found, wanted = dict(getattr(made, what)()), dict(getattr(expected, what)())
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert found[name].dtype == tensor.dtype, f"{stage} {name}"
                assert torch.equal(found[name], tensor), f"{stage} {name}"
