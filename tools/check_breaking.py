"""Checks that the contract breaks nobody who speaks the one before it.

    python tools/check_breaking.py

Compares protos/omni.binpb with its previous version: that of the last commit when it has been changed since, else the
version that the last commit to touch it replaced. A history without one (a new or a shallow clone) has nothing to
compare. Exit status 100 and buf's own report when something breaks.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGE = "protos/omni.binpb"


def git(*arguments: str) -> bytes:
    """Output of a git command at the root; empty when it fails."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False).stdout


def previous() -> bytes:
    """The contract before the one that lies here; empty when there is none."""
    here = (ROOT / IMAGE).read_bytes()
    for commit in git("log", "-2", "--format=%H", "--", IMAGE).decode().split():
        image = git("show", f"{commit}:{IMAGE}")
        if image != here:
            return image
    return b""


def main() -> None:
    """Runs ``buf breaking`` against the previous contract."""
    image = previous()
    if not image:
        print("no earlier contract to compare with")
        return
    with tempfile.TemporaryDirectory() as scratch:
        against = Path(scratch) / "previous.binpb"
        against.write_bytes(image)
        buf = Path(sys.executable).parent / "buf"
        command = [buf, "breaking", IMAGE, "--path", "omni/v1", "--against", against]
        sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
