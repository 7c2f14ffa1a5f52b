"""Figures, what they should be, and how they are shown: as a table and as JSON. Nothing is measured here."""

import operator
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import zmq

_COMPARISONS = {"<=": operator.le, ">=": operator.ge}
_PACKAGES = ("aiohttp", "ctranslate2", "msgspec", "numpy", "onnxruntime", "pyzmq", "uvloop", "xllamacpp")


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure. `scale` multiplies the repetitions within a round."""

    rounds: int = 7
    scale: float = 1.0

    def times(self, n: int) -> int:
        return max(2, round(n * self.scale))


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of DESIGN.md section 10: `sign` is `<=` or `>=`."""

    sign: str
    bound: float

    def met(self, value: float) -> bool:
        return bool(_COMPARISONS[self.sign](value, self.bound))

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: a value a round. A ratio is one of two sides measured in the same round."""

    name: str
    unit: str
    values: Sequence[float]
    goal: Goal | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        return self.goal.met(self.median) if self.goal else None

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "low": min(self.values),
            "high": max(self.values),
            "rounds": len(self.values),
            "goal": str(self.goal) if self.goal else None,
            "met": self.met,
        }


@dataclass(slots=True)
class Result:
    """What one benchmark found. `notes` say what a reader must know to believe the figures."""

    about: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, unit: str, values: Sequence[float], goal: Goal | None = None) -> None:
        self.figures.append(Figure(name, unit, values, goal))


def about(docstring: str | None) -> str:
    """What a benchmark's docstring says behind its name, in one line."""
    return " ".join((docstring or "").partition(":")[2].split())


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def machine() -> dict[str, Any]:
    """Where and with what the figures were made."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["tools/bench/run", *sys.argv[1:]]),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": os.getloadavg()[0],
        "versions": {
            "python": platform.python_version(),
            "libzmq": zmq.zmq_version(),
            **{name: version(name) for name in _PACKAGES},
        },
    }


def table(name: str, result: Result) -> str:
    """The figures of one benchmark for a terminal, and as Markdown."""
    rows = [(name, "unit", "median", "low to high", "goal", "")]
    rows += [
        (
            figure.name,
            figure.unit,
            _short(figure.median),
            f"{_short(min(figure.values))} to {_short(max(figure.values))}",
            str(figure.goal or ""),
            {None: "", True: "met", False: "missed"}[figure.met],
        )
        for figure in result.figures
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(
        [result.about, "", *lines, *(["", *(f"- {note}" for note in result.notes)] if result.notes else [])]
    )


def to_json(facts: dict[str, Any], results: dict[str, Result]) -> bytes:
    found = {
        name: {
            "about": result.about,
            "figures": [figure.as_json() for figure in result.figures],
            "notes": result.notes,
        }
        for name, result in results.items()
    }
    return msgspec.json.format(msgspec.json.encode({**facts, "benchmarks": found}), indent=2) + b"\n"


def _short(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _commit() -> str:
    """Empty outside a checkout; `+` when files differ from it."""
    root = Path(__file__).parents[2]
    try:
        said = subprocess.run(
            ["git", "-C", root, "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return said.stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
