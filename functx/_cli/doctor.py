"""``functx doctor``: print versions, test the main transforms, and list missing packages."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import functx
from functx._cli.target import status, write

# Optional packages, and what to install for them. All others are installed by their own name.
_EXTRAS = {
    "jax": "'functx[jax]'",
    **dict.fromkeys(("matplotlib", "rich", "scikit-learn"), "'functx[demo]'"),
    **dict.fromkeys(("opacus", "jax_privacy"), "'functx[privacy]'"),
}


def add_doctor(commands: Any) -> None:
    """Add ``functx doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="print versions, what works here, and which optional packages are missing",
        description="Print versions and devices, try the main transforms, and name the optional "
        "packages that are missing. Exit status: 0, or 1 if something that is installed fails.",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything as JSON")
    parser.set_defaults(run=functools.partial(status, "doctor", _doctor))


def _doctor(options: argparse.Namespace) -> int:
    versions: dict[str, str | None] = {
        "functx": functx.__version__,
        "python": platform.python_version(),
    }
    versions |= {name: _version(name) for name in ("torch", "optree", *_EXTRAS, "transformers")}
    devices = ["cpu", *map(torch.cuda.get_device_name, range(torch.cuda.device_count()))]
    checks = {name: _tried(check) for name, check in _CHECKS.items()}
    rows = [
        *(
            (name, version or f"missing: pip install {_EXTRAS.get(name, name)}")
            for name, version in versions.items()
        ),
        ("devices", ", ".join(devices)),
        *checks.items(),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}")
    found = {"versions": versions, "devices": devices, "checks": checks}
    write(options.json, lambda path: path.write_text(json.dumps(found, indent=2) + "\n"))
    return int(any(text.startswith("FAILS") for text in checks.values()))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tried(check: Callable[[], str | None]) -> str:
    try:
        return check() or "works"
    except Exception as error:
        return f"FAILS: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _region(x: torch.Tensor) -> torch.Tensor:
    return functx.remat(lambda x: x.sin().exp())(x).sum()


def _transforms() -> str | None:
    x = torch.linspace(0, 1, 6).view(2, 3)
    found, expected = functx.vmap(functx.grad(_region))(x), x.cos() * x.sin().exp()
    return None if torch.allclose(found, expected) else "FAILS: wrong gradients"


def _compiled() -> str | None:
    x = torch.linspace(0, 1, 3)
    found = functx.jit(functx.grad(_region))(x)
    return None if torch.allclose(found, x.cos() * x.sin().exp()) else "FAILS: wrong gradients"


def _jax() -> str | None:
    if importlib.util.find_spec("jax") is None:
        return "JAX is not installed"
    from functx.compat import crosscheck

    found = crosscheck(_region, torch.linspace(0, 1, 3))
    agrees = not found.problems()
    return f"works, on {found.environment['jax device']}" if agrees else "FAILS: numbers differ"


_CHECKS = {"vmap(grad(remat))": _transforms, "functx.jit": _compiled, "to_jax": _jax}
