"""`tools/bench/run NAME...`: run benchmarks, print tables, keep JSON."""

import argparse
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import uvloop
from tools.bench import embedded, hop, identity, latency, omni_cpu, slow_reader, stream
from tools.bench.report import Effort, Result, machine, table, to_json

from omni_common.errors import OmniError

BENCHMARKS: dict[str, Callable[[Effort], Coroutine[None, None, Result]]] = {
    "hop": hop.measure,
    "stream": stream.measure,
    "latency": latency.measure,
    "identity": identity.measure,
    "slow_reader": slow_reader.measure,
    "embedded": embedded.measure,
    "omni_cpu": omni_cpu.measure,
}
QUICK = Effort(rounds=1, scale=0.02)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/bench/run", description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*BENCHMARKS, "all"], metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--rounds", type=int, default=Effort().rounds, help=f"default {Effort().rounds}")
    parser.add_argument("--quick", action="store_true", help="a few repetitions: shows that it runs, nothing else")
    arguments = parser.parse_args()
    effort = QUICK if arguments.quick else Effort(arguments.rounds)
    names = list(BENCHMARKS) if "all" in arguments.names else list(dict.fromkeys(arguments.names))

    facts = machine()
    print(", ".join(f"{key} {value}" for key, value in facts.items() if key != "versions"))
    results: dict[str, Result] = {}
    for name in names:
        try:
            results[name] = uvloop.run(BENCHMARKS[name](effort))
        except OmniError as error:
            print(f"{name}: {error.message}", file=sys.stderr)
            return 1
        print(f"\n{table(name, results[name])}", flush=True)
        facts["load_after"] = os.getloadavg()[0]
        if arguments.json:
            arguments.json.write_bytes(to_json(facts, results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
