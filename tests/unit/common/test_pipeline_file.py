"""Pipeline files: what is accepted, which source wins, and what the message of every kind of mistake says."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_common.pipeline import Pipeline
from omni_common.pipeline_check import PipelineError
from omni_common.pipeline_file import EVERY_STAGE, known_pipelines, load_pipelines
from omni_common.yaml_marks import YamlError, parse

CHAT = """\
name: chat
stages:
  thinker:
    engine: fake
    params: {temperature: 0.1, max_tokens: 10}
    options: {rate: 5, more: {a: 1, b: 2}}
  talker:
    engine: onnx
    inputs: [thinker]
    params: {voice: heart}
tasks:
  chat:
    input: {text: thinker}
    output: {text: thinker, audio: talker}
limits: {queue: 64, queue_s: 30}
"""


class Folder:
    """Pipeline files of one test."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> str:
        (self.path / name).write_text(textwrap.dedent(text))
        return str(self.path / name)

    def edit(self, old: str, new: str) -> str:
        assert old in CHAT
        return self.write("chat.yaml", CHAT.replace(old, new))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    files = Folder(tmp_path)
    files.write("chat.yaml", CHAT)
    return files


def one(file: str, *overrides: str, **more: object) -> Pipeline:
    [pipeline] = load_pipelines([file], list(overrides), **more).values()  # type: ignore[arg-type]
    return pipeline


def problems(file: str | list[str], *overrides: str, **more: object) -> list[str]:
    """Lines of the error, which must be raised, with the file's folder cut off."""
    files = [file] if isinstance(file, str) else file
    with pytest.raises(PipelineError) as caught:
        load_pipelines(files, list(overrides), **more)  # type: ignore[arg-type]
    assert caught.value.code == "invalid_pipeline"
    return re.sub(r"/\S*/", "", caught.value.message).split("\n")


# ---------------------------------------------------------------------------------------------------------- accepted


def test_the_pipelines_of_this_repository_load_together() -> None:
    assert known_pipelines() == ["embedded", "qwen2_5_omni", "qwen3_omni", "speech"]
    loaded = load_pipelines(["embedded", "speech"])
    assert list(loaded) == ["embedded", "speech"]
    assert loaded["speech"].stages.keys() == {"talker", "code2wav"}
    assert loaded["speech"].stages["talker"].inputs == []
    assert loaded["speech"].tasks.keys() == {"speech"}
    for name, stage in loaded["speech"].stages.items():
        assert stage.digest(name) == loaded["embedded"].stages[name].digest(name)


def test_a_path_and_a_name_twice_are_one_pipeline() -> None:
    assert list(load_pipelines(["speech", "speech", "deploy/pipelines/../pipelines/speech.yaml"])) == ["speech"]


def test_the_name_is_the_stem_unless_the_file_says_otherwise(folder: Folder) -> None:
    assert one(folder.write("plain.yaml", CHAT.replace("name: chat\n", ""))).name == "plain"
    assert one(folder.write("child.yaml", "base: chat.yaml")).name == "child"


def test_base_merges_mappings_and_replaces_lists(folder: Folder) -> None:
    folder.write("mid.yaml", "base: chat.yaml\naliases: [a, b]\nstages: {thinker: {options: {more: {b: 3}}}}\n")
    top = one(folder.write("top.yaml", "base: mid.yaml\naliases: [c]\nstages: {thinker: {params: {max_tokens: 5}}}\n"))
    assert top.aliases == ["c"]
    assert top.stages["thinker"].options == {"rate": 5, "more": {"a": 1, "b": 3}}
    assert top.stages["thinker"].params == {"temperature": 0.1, "max_tokens": 5}
    assert top.tasks.keys() == {"chat"}


def test_only_drops_stages_their_edges_and_the_tasks(folder: Folder) -> None:
    text = "base: chat.yaml\nonly: [talker]\ntasks: {say: {input: {text: talker}, output: {audio: talker}}}\n"
    say = one(folder.write("say.yaml", text))
    assert list(say.stages) == ["talker"]
    assert say.stages["talker"].inputs == []
    assert list(say.tasks) == ["say"]


def test_precedence_is_yaml_overlay_global_flag_set(folder: Folder) -> None:
    file = str(folder.path / "chat.yaml")
    folder.write("chat.gpu.yaml", "stages: {thinker: {params: {temperature: 0.2, top_k: 7, top_p: 0.5}, slots: 32}}")

    def sampling(*overrides: str, **more: object) -> tuple[object, ...]:
        params = one(file, *overrides, **more).stages["thinker"].params
        return tuple(params.get(key) for key in ("temperature", "top_k", "top_p", "max_tokens"))

    flags = {"thinker": {"top_k": 8, "top_p": 0.6}}
    sets = ["stages.thinker.params.top_p=0.7", "stages.thinker.params.top_p=0.8"]
    assert sampling() == (0.1, None, None, 10)
    assert sampling(platform="gpu") == (0.2, 7, 0.5, 10)
    assert sampling(platform="gpu", global_params=flags) == (0.2, 8, 0.6, 10)
    assert sampling(*sets, platform="gpu", global_params=flags) == (0.2, 8, 0.8, 10)
    assert one(file, platform="gpu").stages["thinker"].slots == 32


def test_a_child_is_merged_over_its_base_with_the_bases_overlay(folder: Folder) -> None:
    folder.write("chat.gpu.yaml", "stages: {thinker: {slots: 32, threads: 4}}")
    child = folder.write("child.yaml", "base: chat.yaml\nstages: {thinker: {slots: 2}}")
    assert one(child, platform="gpu").stages["thinker"].slots == 2
    assert one(child, platform="gpu").stages["thinker"].threads == 4


def test_a_global_parameter_reaches_every_stage_that_knows_it(folder: Folder) -> None:
    pipeline = one(str(folder.path / "chat.yaml"), global_params={EVERY_STAGE: {"stop": ["x", "y"], "speed": 2.0}})
    assert pipeline.stages["thinker"].params["stop"] == ["x", "y"]
    assert "speed" not in pipeline.stages["thinker"].params
    assert pipeline.stages["talker"].params == {"voice": "heart", "speed": 2.0}


def test_set_parses_its_value_as_yaml_and_reaches_every_kind_of_key(folder: Folder) -> None:
    flags = [
        "limits.queue=4",
        "stages.talker.replicas=2",
        "stages.talker.params.voice='1'",
        "stages.thinker.params.temperature=1e-1",
        'stages.thinker.params.stop=["\\n", no]',
        "stages.thinker.options.more.b=null",
        "stages.thinker.options.new={x: [1]}",
        "languages=[en, no]",
    ]
    pipeline = one(str(folder.path / "chat.yaml"), *flags)
    assert (pipeline.limits.queue, pipeline.limits.queue_s) == (4, 30)
    assert pipeline.stages["talker"].replicas == 2
    assert pipeline.stages["talker"].params["voice"] == "1"
    assert pipeline.stages["thinker"].params["temperature"] == 0.1
    assert pipeline.stages["thinker"].params["stop"] == ["\n", "no"]
    assert pipeline.stages["thinker"].options == {"rate": 5, "more": {"a": 1, "b": None}, "new": {"x": [1]}}
    assert pipeline.languages == ["en", "no"]


def test_set_for_a_stage_of_one_pipeline_leaves_the_other_alone() -> None:
    loaded = load_pipelines(["embedded", "speech"], ["stages.thinker.replicas=3", "stages.talker.replicas=2"])
    assert loaded["embedded"].stages["thinker"].replicas == 3
    assert {pipeline.stages["talker"].replicas for pipeline in loaded.values()} == {2}
    assert "thinker" not in loaded["speech"].stages


# ------------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("voice:", "voise:", "chat.yaml:10:14: stages.talker.params.voise: unknown key `voise`; did you mean `voice`?"),
        ("engine: onnx", "engnie: onnx", "chat.yaml:8:5: stages.talker.engnie: unknown key `engnie`; did you mean"),
        ("engine: onnx", "engnie: onnx", "chat.yaml:8:5: stages.talker: `engine` is missing"),
        (
            "engine: onnx",
            "engine: onxx",
            "chat.yaml:8:13: stages.talker.engine: unknown engine `onxx`; did you mean `onnx`",
        ),
        ("max_tokens: 10", "max_tokens: 0", "chat.yaml:5:44: stages.thinker.params.max_tokens: expected `int` >= 1"),
        (
            "max_tokens: 10",
            "max_tokens: ten",
            "chat.yaml:5:44: stages.thinker.params.max_tokens: expected `int`, got `str`",
        ),
        ("queue: 64", "queue: '64'", "chat.yaml:15:17: limits.queue: expected `int`, got `str`"),
        (
            "queue: 64",
            "zzz: 64",
            "chat.yaml:15:10: limits.zzz: unknown key `zzz`; valid: audio_mib, audio_s, first_chunk_s",
        ),
        (
            "limits: {queue: 64, queue_s: 30}",
            "limits: 7",
            "chat.yaml:15:9: limits: wants a mapping with queue, queue_s",
        ),
        ("inputs: [thinker]", "inputs: thinker", "chat.yaml:9:13: stages.talker.inputs: expected `array`, got `str`"),
        ("inputs: [thinker]", "inputs: [3]", "chat.yaml:9:14: stages.talker.inputs.0: expected `str`, got `int`"),
        (
            "inputs: [thinker]",
            "inputs: [thinkr]",
            "chat.yaml:9:13: stages.talker.inputs: no stage `thinkr`; did you mean `thinker`",
        ),
        (
            "inputs: [thinker]",
            "inputs: [thinker, thinker]",
            "chat.yaml:9:13: stages.talker.inputs: `thinker` stands 2 times",
        ),
        ("audio: talker", "audio: speaker", "chat.yaml:14:36: tasks.chat.output.audio: no stage `speaker`"),
        (
            "audio: talker",
            "sound: talker",
            "chat.yaml:14:29: tasks.chat.output.sound: unknown value `sound`; valid: audio, image",
        ),
        ("input: {text: thinker}", "input: {}", "chat.yaml:13:12: tasks.chat.input: is empty"),
        (
            "    engine: fake\n",
            "    engine: fake\n    engine: onnx\n",
            "chat.yaml:5:5: the key `engine` stands twice; the first is at chat.yaml:4:5",
        ),
        (", audio: talker", "", "chat.yaml:8:5: stages.talker: no task uses this stage"),
        ("    inputs: [thinker]\n", "", "chat.yaml:13:36: tasks.chat.output.audio: no input of chat leads to `talker`"),
        (
            "    engine: fake\n",
            "    engine: fake\n    inputs: [talker]\n",
            "the stages feed each other in a circle: thinker > talker > thinker",
        ),
        (
            "    engine: fake\n",
            "    engine: fake\n    inputs: [thinker]\n",
            "chat.yaml:5:13: stages.thinker.inputs: the stages feed each other",
        ),
        ("name: chat", "name: My-Chat", "chat.yaml:1:7: name: expected `str` matching regex"),
        ("name: chat", "base: 3", "chat.yaml:1:7: base: no file 3"),
        ("name: chat", "base: chatt.yaml", "chat.yaml:1:7: base: no file chatt.yaml; did you mean `chat.yaml`?"),
        (
            "name: chat",
            "base: chat.yaml",
            "chat.yaml:1:7: base: the files are each other's base: chat.yaml > chat.yaml",
        ),
        ("name: chat", "only: [talker]", "chat.yaml:1:1: only: keeps stages of a base"),
        ("name: chat", "name: !!python/object/apply:os.system [true]", "chat.yaml:1:7: tags such as"),
        ("name: chat", "name: [chat", "chat.yaml:2:7: expected"),
        ("name: chat", "name: chat\nyes: 1", "unknown key `yes`; valid: aliases"),
        ("name: chat", "name: chat\n1: 1", "chat.yaml:2:1: the key '1' is not a string"),
        ("name: chat", "name: chat\n\tx: 1", "chat.yaml:2:1: "),
    ],
)
def test_a_mistake_is_named_with_its_place(folder: Folder, old: str, new: str, line: str) -> None:
    found = problems(folder.edit(old, new))
    assert any(line in text for text in found), found


def test_every_problem_is_told_at_once(folder: Folder) -> None:
    folder.edit("voice:", "voise:")
    found = problems(folder.edit("voice: heart", "voise: 1, sped: 2"), "limits.queu=1")
    assert len(found) == 3


@pytest.mark.parametrize("text", ["", "- a\n", "just text\n", "null\n"])
def test_a_file_that_is_no_mapping_is_refused(folder: Folder, text: str) -> None:
    assert "wants a mapping" in problems(folder.write("x.yaml", text))[0]


def test_bytes_that_are_no_text_are_refused(folder: Folder) -> None:
    (folder.path / "x.yaml").write_bytes(b"name: \xff\xfe")
    assert "cannot be read" in problems(str(folder.path / "x.yaml"))[0]
    (folder.path / "x.yaml").write_bytes(b"name: \x00")
    assert "not allowed" in problems(str(folder.path / "x.yaml"))[0]


def test_an_unknown_name_lists_the_known(tmp_path: Path) -> None:
    assert problems("embeded") == [f"no pipeline `embeded`; known: {', '.join(known_pipelines())}"]
    assert problems("nowhere.yaml") == ["nowhere.yaml: no such file"]
    assert "no such file" in problems(str(tmp_path) + "/")[0]


def test_a_missing_overlay_lists_those_that_exist(folder: Folder) -> None:
    file = str(folder.path / "chat.yaml")
    assert "it has none" in problems(file, platform="gpu")[0]
    folder.write("chat.cpu.yaml", "limits: {queue: 1}")
    folder.write("chat.rocm.yaml", "limits: {queue: 1}")
    assert problems(file, platform="gpu")[0].endswith("for platform `gpu`; there are: cpu, rocm")


def test_a_mistake_in_an_overlay_or_a_base_blames_that_file(folder: Folder) -> None:
    folder.write("chat.gpu.yaml", "limits:\n  queue: -1\n")
    assert problems(str(folder.path / "chat.yaml"), platform="gpu") == [
        "chat.gpu.yaml:2:10: limits.queue: expected `int` >= 0"
    ]
    folder.edit("queue: 64", "queue: -2")
    assert problems(folder.write("top.yaml", "base: chat.yaml")) == [
        "chat.yaml:15:17: limits.queue: expected `int` >= 0"
    ]


def test_a_circle_of_bases_is_refused(folder: Folder) -> None:
    folder.write("a.yaml", "base: b.yaml")
    file = folder.write("b.yaml", "base: a.yaml")
    assert problems(file) == ["a.yaml:1:7: base: the files are each other's base: b.yaml > a.yaml > b.yaml"]


@pytest.mark.parametrize("only", ["[talkr]", "talkr", "[]", "[3]", "[{a: 1}]", "null"])
def test_only_names_stages_of_the_base(folder: Folder, only: str) -> None:
    assert ": only: " in problems(folder.write("x.yaml", f"base: chat.yaml\nonly: {only}\n"))[0]


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("limits.queue=lots", "--set limits.queue=lots: limits.queue: expected `int`, got `str`"),
        ("limits.que=1", "--set limits.que=1: limits.que: unknown key `que`; did you mean `queue`?"),
        ("stages.talkr.replicas=1", "stages.talkr: no loaded pipeline has it; did you mean `talker`?"),
        ("stages.talker.params.sped=1", "stages.talker.params.sped: unknown key `sped`; did you mean `speed`?"),
        ("stages.talker.params.speed=9", "stages.talker.params.speed: expected `float` <= 4.0"),
        ("stages.talker.replicas.x=1", "stages.talker.replicas: expected `int`, got `object`"),
        ("stages.talker=1", "stages.talker: wants a mapping with engine, model"),
        ("stages=1", "stages: expected `object`, got `int`"),
        ("only=[talker]", "only: unknown key `only`"),
        ("limits.queue", "--set limits.queue: wants KEY=VALUE"),
        ("=1", "--set =1: wants KEY=VALUE"),
        ("limits..queue=1", "wants KEY=VALUE"),
        ("limits.queue=[1", "--set limits.queue=[1: "),
    ],
)
def test_a_wrong_flag_is_blamed_not_a_line(folder: Folder, flag: str, line: str) -> None:
    found = problems(str(folder.path / "chat.yaml"), flag)
    assert all(text.startswith("--set ") for text in found)
    assert any(line in text for text in found), found


def test_a_wrong_global_parameter_is_named(folder: Folder) -> None:
    file = str(folder.path / "chat.yaml")
    assert "did you mean `temperature`" in problems(file, global_params={EVERY_STAGE: {"temprature": 1}})[0]
    assert "no loaded pipeline has it" in problems(file, global_params={"tanker": {"seed": 1}})[0]
    assert problems(file, global_params={"thinker": {"seed": "x"}})[0].startswith("global parameter seed: stages.")


def test_pipelines_that_share_a_stage_must_agree_on_its_processes(folder: Folder) -> None:
    text = "base: chat.yaml\nonly: [talker]\ntasks: {say: {input: {text: talker}, output: {audio: talker}}}\nstages:\n"
    same = folder.write("same.yaml", text + "  talker: {params: {speed: 2.0}}\n")
    other = folder.write("other.yaml", text + "  talker:\n    replicas: 2\n    options: {a: 1}\n")
    chat = str(folder.path / "chat.yaml")
    assert load_pipelines([chat, same]).keys() == {"chat", "same"}
    found = problems([chat, other])
    assert len(found) == 2
    assert found[0].startswith("other.yaml:7:14: stages.talker.options: {'a': 1}, but pipeline `chat`, which shares")
    assert "stages.talker.replicas: 2, but" in found[1]


def test_pipelines_loaded_together_have_their_own_names_and_aliases(folder: Folder) -> None:
    chat = folder.edit("name: chat", "name: chat\naliases: [gpt]")
    assert "alias" in problems([chat, folder.write("b.yaml", "base: chat.yaml")])[0]
    assert "also named `chat`" in problems([chat, folder.write("c.yaml", "base: chat.yaml\nname: chat")])[0]


# ---------------------------------------------------------------------------------------------------------- the YAML


def at(line: int, column: int) -> str:
    return f"{line}:{column}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (
            "[no, 010, 12:30, 2020-01-01, 1_000, .nan, '1', NO]",
            ["no", "010", "12:30", "2020-01-01", "1_000", ".nan", "1", "NO"],
        ),
        ("[true, False, null, ~, 0x1F, -3, +4, 1e-5, .5, 1.]", [True, False, None, None, 31, -3, 4, 1e-5, 0.5, 1.0]),
        ("{a: &x [1], b: *x}", {"a": [1], "b": [1]}),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    assert parse(text, at).plain() == value


@pytest.mark.parametrize(
    "text", ["&a [*a]", "&a {b: *a}", "!!int x", "!!bool x", "{? [a] : b}", "a: b\n---\nc: d", "{a: 1, a: 1}"]
)
def test_what_has_no_plain_meaning_is_refused(text: str) -> None:
    with pytest.raises(YamlError):
        parse(text, at)


text = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=50)
json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


@given(json_like)
def test_json_is_read_as_it_is(value: object) -> None:
    assert parse(json.dumps(value), at).plain() == value


@given(st.text(alphabet="ab:{}[]-,&*!|>\"'#\n \t0.", max_size=40))
def test_any_text_is_parsed_or_refused_with_a_place(text: str) -> None:
    try:
        parse(text, at)
    except YamlError as error:
        assert re.match(r"\d+:\d+: ", str(error))


def test_reading_pipelines_imports_no_model_library() -> None:
    code = (
        "import sys; from omni_common.pipeline_file import load_pipelines; load_pipelines(['embedded', 'speech']);"
        "print(sorted({'torch', 'numpy', 'onnxruntime', 'ctranslate2', 'xllamacpp'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --------------------------------------------------------------------------------------------------------- streaming


def test_streaming_is_switched_off_for_a_pipeline_a_stage_or_an_edge(folder: Folder) -> None:
    def held(*overrides: str) -> tuple[set[str], set[str]]:
        pipeline = one(str(folder.path / "chat.yaml"), *overrides)
        return set(pipeline.held("thinker")), set(pipeline.held("talker"))

    assert held() == (set(), set())
    assert held("stream=false") == (set(), {"thinker"})
    assert held("stages.talker.stream=false") == (set(), {"thinker"})
    assert held("stages.talker.stream.thinker=false") == (set(), {"thinker"})
    assert held("stream=false", "stages.talker.stream=true") == (set(), set())
    assert held("stream=false", "stages.talker.stream.thinker=true") == (set(), set())
    assert held("stream=false", "stages.talker.stream={}") == (set(), {"thinker"})


def test_a_wrong_edge_is_named(folder: Folder) -> None:
    file = folder.edit("inputs: [thinker]", "inputs: [thinker]\n    stream: {thinkr: false}")
    assert problems(file) == [
        "chat.yaml:10:22: stages.talker.stream.thinkr: no input `thinkr`; did you mean `thinker`?"
    ]
    file = folder.edit("inputs: [thinker]", "inputs: [thinker]\n    stream: later")
    assert problems(file)[0].startswith("chat.yaml:10:13: stages.talker.stream: expected `bool | object | null`")


def test_a_stage_of_two_pipelines_waits_in_both_or_in_none(folder: Folder) -> None:
    """Where it has the input in both; an edge that `only` drops is no contradiction."""
    chat = folder.edit("inputs: [thinker]", "inputs: [thinker]\n    stream: {thinker: false}")
    alone = folder.write(
        "alone.yaml",
        """\
        base: chat.yaml
        only: [talker]
        tasks: {speech: {input: {text: talker}, output: {audio: talker}}}
        """,
    )
    assert {len(pipeline.held("talker")) for pipeline in load_pipelines([chat, alone]).values()} == {0, 1}
    twin = folder.write("twin.yaml", "base: chat.yaml\nstages: {talker: {stream: true}}\n")
    (found,) = problems([chat, twin])
    assert "stages.talker.stream: `thinker` streams in one of `twin` and `chat`" in found
