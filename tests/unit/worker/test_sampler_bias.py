"""Biases of tokens, as the library's processor has them; which ids there are."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("xllamacpp")

from omni_worker.torchvision_shim import declare_ops

declare_ops()

import torch  # noqa: E402
from transformers.generation.logits_process import SequenceBiasLogitsProcessor  # noqa: E402

from omni_common.errors import OmniError  # noqa: E402
from omni_common.params import Generation, Sampling, check_biases  # noqa: E402
from omni_worker.engines.llamacpp import sampling  # noqa: E402
from omni_worker.engines.sampler import Draw, sample  # noqa: E402


def chosen(logits: torch.Tensor, params: Generation) -> list[int]:
    draws = [Draw(params, 7, row) for row in range(len(logits))]
    found: list[int] = sample(logits, draws, "thinker").tolist()
    return found


def test_a_bias_is_added_to_the_score_of_its_token_alone() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(3))
    biases = {3: 1.25, 7: -100.0, 11: 0.5}
    library = SequenceBiasLogitsProcessor({(id_,): bias for id_, bias in biases.items()})
    expected = library(torch.zeros(64, 1, dtype=torch.long), logits.clone())
    params = Generation(logit_bias=[f"{id_}:{bias}" for id_, bias in biases.items()])
    assert chosen(logits, params) == expected.argmax(-1).tolist() != logits.argmax(-1).tolist()
    warm = Generation(temperature=1.0)
    assert chosen(logits, Generation(temperature=1.0, logit_bias=params.logit_bias)) == chosen(expected, warm)


def test_one_row_alone_is_biased() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    draws = [Draw(Generation(logit_bias=["0:100"]), 1, 0), Draw(Generation(), 1, 0)]
    assert sample(logits, draws, "thinker").tolist() == [0, 2]
    assert logits.tolist() == [[1.0, 2.0, 3.0]] * 2, "what is given stays as it was"


def test_an_id_beyond_the_vocabulary_is_refused() -> None:
    check_biases(Sampling(logit_bias=["9:1"]), 10)
    with pytest.raises(OmniError) as caught:
        check_biases(Sampling(logit_bias=["9:1", "10:-1"]), 10)
    assert (caught.value.status, caught.value.param) == (400, "logit_bias")


def test_llama_cpp_gets_biases_beside_what_must_not_come_yet() -> None:
    params = Sampling(logit_bias=["5:-2.5"], min_tokens=3, stop_token_ids=[8])
    assert sampling(params, 1, 10, 2)["logit_bias"] == [[5, -2.5], [8, False]]
    assert sampling(params, 1, 10, 3)["logit_bias"] == [[5, -2.5]]
    assert "logit_bias" not in sampling(Sampling(), 1, 10, 0)
