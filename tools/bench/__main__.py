"""Runs the benchmark and writes ``out/bench.json``.

python -m tools.bench [--part control|data|engine|start]...
"""

import argparse
import importlib
from pathlib import Path

from tools.bench import report

PARTS = ("control", "data", "engine", "start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="may be given several times; default: all")
    parser.add_argument("--out", type=Path, default=Path("out/bench.json"))
    arguments = parser.parse_args()
    for part in arguments.part or PARTS:
        rows = importlib.import_module(f"tools.bench.{part}").run()
        report.show(rows)
        report.save(rows, arguments.out)


if __name__ == "__main__":
    main()
