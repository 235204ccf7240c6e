"""``python -m bench``: every bench in a process of its own, then their tables into README.md."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from bench import _readme

ROOT = Path(__file__).parent.parent
BENCHES = sorted(
    path.stem for path in (ROOT / "bench").glob("*.py") if not path.stem.startswith("_")
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("benches", nargs="*", help=f"some of: {', '.join(BENCHES)} (default: all)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    unknown = set(args.benches) - set(BENCHES)
    if unknown:
        parser.error(f"no such bench: {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    for bench in args.benches or BENCHES:
        command = [sys.executable, "-m", f"bench.{bench}", "--device", args.device]
        subprocess.run(command, check=True, cwd=ROOT)
    readme = ROOT / "README.md"
    readme.write_text(_readme.filled(readme.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
