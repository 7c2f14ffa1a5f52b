"""The benchmarks run and say what they found; how fast anything is, is not asked here."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RUN = ROOT / "tools" / "bench" / "run"

#: A figure that each must have, and its goal (DESIGN.md section 10).
KEY_FIGURES = {
    "hop": {"4 MiB, read: segment / bus": ">= 8", "4 MiB, read: bus / bare": "<= 1.2"},
    "stream": {"events a second, Omnibus / bare": ">= 0.5", "gateway's CPU an event, Omnibus / bare": "<= 1.7"},
    "latency": {"bus / half a blocking round trip": "<= 2.5"},
    "identity": {"2 MB tensor, 1 at a time: p50": "<= 4", "2 MB tensor, 150 at a time": ">= 350"},
    "slow_reader": {
        "beside / alone": "<= 1.25",
        "tokens that the thinker made for the slow client, once all was full": "<= 0",
    },
    "omni_cpu": {"8: Omnibus / generate, one after another": ">= 6"},
    "embedded": {
        "one core: short, by text, wall time / in a row": "<= 1.05",
        "one core: short, by voice, first audio": "<= 0.6",
    },
}


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RUN, *arguments], cwd=cwd, capture_output=True, text=True, timeout=180, check=False)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return pytest.importorskip("tools.bench.report")


@pytest.mark.parametrize(
    "name",
    [
        *("hop", "stream", "latency", "identity", "slow_reader"),
        pytest.param("omni_cpu", marks=[pytest.mark.slow]),
        pytest.param("embedded", marks=[pytest.mark.embedded, pytest.mark.slow]),
    ],
)
def test_a_benchmark_runs_and_keeps_its_figures(name: str, tmp_path: Path) -> None:
    done = run(name, "--quick", "--json", "found.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["command"] == f"tools/bench/run {name} --quick --json found.json"
    assert {"date", "cpu", "cores", "load_before", "load_after", "versions", "commit"} <= found.keys()
    figures = {figure["name"]: figure for figure in found["benchmarks"][name]["figures"]}
    assert {key: figures[key]["goal"] for key in KEY_FIGURES[name]} == KEY_FIGURES[name]
    for figure in figures.values():
        assert 0 <= figure["low"] <= figure["median"] <= figure["high"] < math.inf, figure
        assert figure["rounds"] == 1 or name == "slow_reader"
        assert (figure["met"] is None) == (figure["goal"] is None)
        assert f"| {figure['name']} " in done.stdout


def test_an_unknown_benchmark_is_refused(tmp_path: Path) -> None:
    done = run("hop", "speed", cwd=tmp_path)
    assert done.returncode == 2
    assert "invalid choice: 'speed'" in done.stderr


@pytest.mark.parametrize(
    ("sign", "values", "met"),
    [("<=", [1.0, 9.0, 2.0], True), ("<=", [1.0, 9.0, 2.1], False), (">=", [2.0], True), (">=", [1.9, 1.9], False)],
)
def test_a_goal_is_held_against_the_median(report: Any, sign: str, values: list[float], met: bool) -> None:
    figure = report.Figure("x", "us", values, report.Goal(sign, 2.0))
    assert figure.met is met
    assert figure.as_json()["met"] is met
    assert report.Figure("x", "us", values).met is None


def test_ratios_are_of_the_same_round(report: Any) -> None:
    assert report.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        report.ratios([1.0, 2.0], [1.0])


def test_the_table_says_what_is_missed(report: Any) -> None:
    result = report.Result("about it")
    result.add("good", "x", [1.0, 3.0, 2.0], report.Goal("<=", 2))
    result.add("bad", "x", [1234.5], report.Goal("<=", 2))
    result.notes = ["a note"]
    lines = report.table("bench", result).splitlines()
    assert lines[0] == "about it"
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in (lines[2], *lines[4:6])] == [
        ["bench", "unit", "median", "low to high", "goal", ""],
        ["good", "x", "2", "1 to 3", "<= 2", "met"],
        ["bad", "x", "1234", "1234 to 1234", "<= 2", "missed"],
    ]
    assert lines[-1] == "- a note"
