#!/usr/bin/env python3
"""Makes the tiny random-weight models that the demo and the tests run on, into the cache, once."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    """Prints the folder of each model."""
    from tools.tiny.recipes import RECIPES
    from tools.tiny.registry import ensure, models_folder

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(RECIPES)}; all when none is given")
    parser.add_argument(
        "--into", type=Path, default=models_folder(), help="folder that gets them (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - RECIPES.keys():
        parser.error(f"no model named {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    for name in arguments.names or RECIPES:
        print(ensure(RECIPES[name], arguments.into))


if __name__ == "__main__":
    main()
