"""``python -m bench``: every bench in a process of its own, then their tables into the pages.

On the CPU all of ``bench/``, into README.md and docs/. With ``--device cuda`` those of
``bench/gpu/``, and others that take a device, into docs/gpu.md; in so many minutes altogether.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench import _readme

ROOT = Path(__file__).parent.parent


def _names(folder: str) -> list[str]:
    return sorted(p.stem for p in (ROOT / folder).glob("*.py") if not p.stem.startswith("_"))


BENCHES = {
    "cpu": {name: f"bench.{name}" for name in _names("bench")},
    # What matters most comes first: time may run out.
    "cuda": {
        **{
            name: f"bench.gpu.{name}"
            for name in ("gpt", "gpt_agreement", "gpt_trace", "gpt_per_sample", "gpt_batch")
        },
        "compiled": "bench.compiled",
        "deep_network": "bench.deep_network",
        "overhead": "bench.overhead",
    },
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    for device, benches in BENCHES.items():
        parser.epilog = f"{parser.epilog or ''} {device}: {', '.join(benches)}."
    parser.add_argument("benches", nargs="*", help="some of them (default: all)")
    parser.add_argument("--device", default="cpu", choices=list(BENCHES))
    parser.add_argument("--minutes", type=float, default=7.0, help="for all, on cuda (default: 7)")
    args = parser.parse_args(argv)
    known = BENCHES[args.device]
    unknown = set(args.benches) - set(known)
    if unknown:
        parser.error(f"no such bench: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: no bench runs")
        return 0
    end = time.monotonic() + 60 * args.minutes
    failed = []
    for bench in args.benches or known:
        command = [sys.executable, "-m", known[bench], "--device", args.device]
        left = end - time.monotonic() if args.device == "cuda" else None
        if left is not None and left < 5:
            print(f"{bench}: no time left")
            continue
        try:
            subprocess.run(command, check=True, cwd=ROOT, timeout=left)
        except subprocess.TimeoutExpired:
            print(f"{bench}: no time left; what it had measured is written down")
        except subprocess.CalledProcessError:
            failed.append(bench)
    for page in _readme.PAGES:
        page.write_text(_readme.filled(page.read_text()))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
