"""Stage parameters: what each kind of engine takes, and which field a refusal names."""

from typing import Any, get_args

import pytest

from omni_common.errors import OmniError
from omni_common.params import BY_ENGINE, AnyParams, NoParams, Recognition, Sampling, Speech, check_params


def refused(engine: str, params: Any) -> OmniError:
    with pytest.raises(OmniError) as caught:
        check_params(engine, params, "params")
    assert (caught.value.status, caught.value.code) == (400, "invalid_value")
    return caught.value


@pytest.mark.parametrize(
    ("engine", "params", "want"),
    [
        ("llamacpp", {}, Sampling()),
        ("llamacpp", {"temperature": 2, "top_k": -1, "stop": ["a"]}, Sampling(temperature=2.0, top_k=-1, stop=["a"])),
        ("llamacpp", {"seed": None, "stop_token_ids": [1]}, Sampling(stop_token_ids=[1])),
        ("recogniser", {"language": "en", "timestamps": True}, Recognition(language="en", timestamps=True)),
        ("onnx", {"voice": "heart", "speed": 0.25}, Speech(voice="heart", speed=0.25)),
        ("fake", {"max_tokens": 1}, Sampling(max_tokens=1)),
        ("an engine without parameters", {}, NoParams()),
    ],
)
def test_parameters_become_the_engines_type(engine: str, params: Any, want: AnyParams) -> None:
    assert check_params(engine, params, "") == want


@pytest.mark.parametrize(
    ("engine", "key", "value"),
    [
        ("llamacpp", "temperature", -0.1),
        ("llamacpp", "temperature", 2.1),
        ("llamacpp", "temperature", "hot"),
        ("llamacpp", "temperature", True),
        ("llamacpp", "temperature", float("nan")),
        ("llamacpp", "top_p", 1.5),
        ("llamacpp", "top_k", -2),
        ("llamacpp", "top_k", 1.5),
        ("llamacpp", "max_tokens", 0),
        ("llamacpp", "max_tokens", None),
        ("llamacpp", "repetition_penalty", 0),
        ("llamacpp", "stop", "one string"),
        ("llamacpp", "stop", ["x"] * 17),
        ("llamacpp", "logit_bias", ["5:1"] * 301),
        ("llamacpp", "stop_token_ids", [1] * 1025),
        ("llamacpp", "voice", "heart"),
        ("transformers", "voice", "x" * 129),
        ("recogniser", "language", 3),
        ("onnx", "speed", 0.2),
        ("onnx", "speed", 4.1),
        ("onnx", "sped", 1.0),
        ("an engine without parameters", "x", 1),
    ],
)
def test_a_wrong_parameter_is_named(engine: str, key: str, value: Any) -> None:
    error = refused(engine, {key: value})
    assert error.param == f"params.{key}"
    assert error.message.startswith(f"params.{key}: ")


def test_an_item_is_named_with_its_place() -> None:
    assert refused("llamacpp", {"stop": ["a", 3]}).param == "params.stop[1]"
    assert refused("llamacpp", {"stop": ["a", "x" * 257]}).param == "params.stop[1]"
    for wrong in ("5", "x:1", "5:x", "5:1000", "-5:1", "5:nan"):
        assert refused("llamacpp", {"logit_bias": ["5:-1.5", wrong]}).param == "params.logit_bias[1]"


def test_what_is_no_mapping_is_refused() -> None:
    assert refused("llamacpp", [1]).param == "params"


def test_every_kind_of_parameters_has_an_engine() -> None:
    assert {*BY_ENGINE.values(), NoParams} == {*get_args(AnyParams)}
