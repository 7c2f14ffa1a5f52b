import argparse
from pathlib import Path

from omni_common.pipeline import Pipeline, Stage, Task
from omni_common.service import pipeline_arguments
from omni_supervisor.cli import main
from omni_supervisor.describe import describe
from omni_supervisor.plan import Plan, Unit, pipeline_flags
from omni_supervisor.serve import add_arguments, example, local_url


def serve_arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


def plan(arguments: argparse.Namespace, pipelines: dict[str, Pipeline]) -> list[Unit]:
    return Plan(arguments, pipelines, Path("/run/x"), [7, 9]).units()


def pipeline(name: str, *stages: str, replicas: int = 1) -> Pipeline:
    return Pipeline(
        name=name,
        stages={
            stage: Stage(engine="fake", inputs=[stages[i - 1]] if i else [], replicas=replicas, load_s=7.0)
            for i, stage in enumerate(stages)
        },
        tasks={"speech": Task(input={"text": stages[0]}, output={"audio": stages[-1]})},
    )


def test_a_process_a_replica_and_shared_stages_once() -> None:
    both = {"a": pipeline("a", "thinker", "talker", replicas=2), "b": pipeline("b", "talker", replicas=2)}
    units = plan(serve_arguments(), both)
    assert [u.name for u in units] == ["scheduler", "thinker-0", "thinker-1", "talker-0", "talker-1", "gateway"]
    assert [u.stage for u in units if u.role == "worker"] == ["thinker", "thinker", "talker", "talker"]
    assert units[1].load_s == 7.0


def test_a_stage_may_be_left_to_workers_that_join() -> None:
    units = plan(serve_arguments(), {"a": pipeline("a", "talker", replicas=0)})
    assert [u.name for u in units] == ["scheduler", "gateway"]


def test_further_replicas_are_described_as_the_first_ones_are() -> None:
    there = Plan(serve_arguments(), {"a": pipeline("a", "talker")}, Path("/run/x"), [7])
    first, more = there.units()[1], there.worker("talker", 12)
    assert (more.name, more.stage, more.load_s) == ("talker-12", "talker", 7.0)
    assert [part.replace("talker-12", "talker-0") for part in more.argv] == list(first.argv)


def test_every_process_loads_the_pipelines_as_the_supervisor_did() -> None:
    arguments = serve_arguments(
        "--pipelines=a,b",
        "--set=stages.talker.slots=2",
        "--set=x=-1",
        "--platform=cuda",
        "--temperature=0.0",
        "--seed=7",
    )
    for unit in plan(arguments, {"a": pipeline("a", "talker")}):
        parser = argparse.ArgumentParser()
        pipeline_arguments(parser)
        mine, _ = parser.parse_known_args(unit.argv[4:])
        theirs, _ = parser.parse_known_args(pipeline_flags(arguments))
        assert mine == theirs
        assert vars(mine).items() <= vars(arguments).items()


def test_addresses_and_keys_are_the_gateways_alone(monkeypatch) -> None:
    monkeypatch.setenv("OMNI_API_KEY", "k1 k2")
    arguments = serve_arguments("--port=81", "--host=::", "--api-key=k3", "--cors-origin=null", "--cors-origin=app://x")
    *others, gateway = plan(arguments, {"a": pipeline("a", "talker")})
    assert gateway.argv[-4:] == ("--listen-fd=7", "--listen-fd=9", "--cors-origin=null", "--cors-origin=app://x")
    assert gateway.fds == (7, 9) and not any(unit.fds for unit in others)
    assert gateway.env == {"OMNI_API_KEY": "k1 k2 k3"}
    assert not any("k3" in flag for unit in (*others, gateway) for flag in unit.argv)
    assert not any(unit.env for unit in others)


def test_the_folder_of_voices_is_the_gateways_alone() -> None:
    *others, gateway = plan(serve_arguments("--voices", "/data/my voices"), {"a": pipeline("a", "talker")})
    assert gateway.argv[-1] == "--voices=/data/my voices"
    assert not any("voices" in part for unit in others for part in unit.argv)
    *_, gateway = plan(serve_arguments(), {"a": pipeline("a", "talker")})
    assert not any("voices" in part for part in gateway.argv)


def test_the_gateway_is_reached_by_loopback() -> None:
    assert local_url("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert local_url("::", 1) == "http://[::1]:1"
    assert local_url("10.0.0.7", 1) == "http://10.0.0.7:1"


def test_the_example_fits_the_server_and_hides_the_key() -> None:
    assert example(serve_arguments(), "http://127.0.0.1:8000") == (
        "omni ask 'What is the capital of France?' --out answer.wav"
    )
    shown = example(serve_arguments("--port=9", "--api-key=secret", "--pipelines=other"), "http://h:9")
    assert "secret" not in shown
    assert "--url http://h:9" in shown and "--model other" in shown


def test_describe_shows_ways_through_the_graph() -> None:
    text = describe(pipeline("a", "talker", "code2wav"))
    assert "talker -> code2wav" in text
    assert "client (text)" in text


def test_validate_prints_the_graph(capsys) -> None:
    assert main(["validate", "embedded,speech"]) == 0
    assert "listener -> thinker -> talker -> code2wav" in capsys.readouterr().out


def test_validate_names_the_nearest_key(capsys) -> None:
    assert main(["validate", "embedded", "--set", "stages.thinker.params.temprature=1"]) == 2
    assert "`temperature`" in capsys.readouterr().err
