"""Tries an installed functx: ``python -I tools/smoke.py EXTRA``, where EXTRA may be left out.

`make smoke` installs a wheel or an sdist into a fresh environment and runs this. The option -I
keeps the source tree away from the import path. Each extra has to bring what its part of functx
needs, and functx without extras has to do without the rest.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import functx

FORBIDDEN = ("jax", "matplotlib", "rich", "sklearn", "transformers")


def the_package():
    """It is complete, comes from the installed distribution, and knows its version."""
    folder = Path(functx.__file__).parent
    assert folder.is_relative_to(sys.prefix), f"{folder} is not of this environment"
    assert (folder / "py.typed").exists()
    distribution = importlib.metadata.distribution("functx")
    assert distribution.version == functx.__version__
    assert any(path.name == "LICENSE" for path in distribution.files)
    for name in functx.__all__:
        getattr(functx, name)


def core():
    """Transforms, regions and policies, with nothing but torch; JAX is asked for by name."""
    found = [name for name in FORBIDDEN if importlib.util.find_spec(name)]
    assert not found, f"functx without extras installs {found}"
    x = torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3)
    region = functx.remat(lambda x: x.sin().exp(), policy=functx.checkpoint_policies.dots_saveable)
    gradients = functx.vmap(functx.grad(lambda x: region(x).sum()))(x)
    torch.testing.assert_close(gradients, x.cos() * x.sin().exp())
    from functx import compat

    key = compat.random.key(0)
    assert compat.random.normal(key, (3,)).shape == (3,)
    asks_for_jax = False
    try:
        compat.to_jax(torch.sin)
    except ImportError as error:
        asks_for_jax = "functx[jax]" in str(error)
    assert asks_for_jax, "without JAX, to_jax has to name the extra that installs it"


def jax():
    """The same function in both frameworks."""
    import jax

    from functx import compat

    region = functx.remat(lambda x: x.sin().exp())
    compat.testing.assert_agrees(lambda x: region(x).sum(), torch.linspace(0, 1, 3))
    gradient = functx.grad(lambda x: jax.numpy.sin(x).sum())(jax.numpy.zeros(2))
    assert gradient.tolist() == [1, 1]
    ours = compat.random.bits(compat.random.key(7), (4,))
    assert ours.tolist() == jax.random.bits(jax.random.key(7), (4,)).tolist()


def demo():
    """The demo at its toy size. Without JAX it leaves the cross-check out."""
    run("-m", "functx", "demo", "--quick")


def test():
    """A test suite of a user, with the assertions of `functx.compat.testing`."""
    import hypothesis  # noqa: F401

    Path("test_smoke.py").write_text(
        "import pytest, torch\n"
        "from functx.compat.testing import assert_agrees\n"
        "@pytest.mark.parametrize('n', [2, 3])\n"
        "def test_sin(n):\n"
        "    assert_agrees(lambda x: x.sin().sum(), torch.linspace(0, 1, n))\n"
    )
    run("-m", "pytest", "-q", "-n", "2", "test_smoke.py")


def models():
    """A model of transformers compared in JAX, and modules of Flax and Equinox in torch."""
    for name in ("accelerate", "diffusers", "lightning"):
        importlib.import_module(name)
    import equinox
    import flax.linen
    import jax

    from functx.compat import module_from_jax

    run("-m", "functx", "crosscheck", "hf:gpt2")
    layer, x = flax.linen.Dense(2), jax.numpy.ones((1, 3))
    module = module_from_jax(layer.apply, layer.init(jax.random.key(0), x))
    module(torch.ones(1, 3)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    assert equinox.nn.Linear(3, 2, key=jax.random.key(0))(x[0]).shape == (2,)


def privacy():
    """The packages that the pages on private training use."""
    import jax_privacy  # noqa: F401
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.step(noise_multiplier=1.0, sample_rate=0.01)
    assert accountant.get_epsilon(delta=1e-5) > 0


def dev():
    """The linters run, and a type checker sees the annotations of functx and of functx.compat."""
    run("-m", "ruff", "--version")
    for name in ("importlinter", "check_jsonschema"):
        importlib.import_module(name)
    Path("typed.py").write_text(
        "import functx\nfrom functx import compat\n"
        "reveal_type(functx.checkpoint_name)\nreveal_type(compat.to_jax)\n"
    )
    said = run("-m", "mypy", "typed.py")
    assert said.count("Revealed type") == 2, said
    assert '"Any"' not in said, said


def docs():
    """The builder of the site."""
    for name in ("material", "mkdocs", "mkdocstrings", "mkdocstrings_handlers.python"):
        importlib.import_module(name)


CHECKS = {check.__name__: check for check in (core, jax, demo, test, models, privacy, dev, docs)}


def run(*arguments):
    """Run this environment's Python and return what it prints; a failure is an error."""
    done = subprocess.run([sys.executable, "-I", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"{arguments} fails:\n{done.stdout}{done.stderr}"
    return done.stdout


def main(extra="core"):
    """Try the package as such, then what the extra brings."""
    the_package()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        CHECKS[extra]()
        doctor = run("-m", "functx", "doctor")
        os.chdir("/")
    print(doctor, end="")
    print(f"functx {functx.__version__}, {extra}: works")


if __name__ == "__main__":
    main(*sys.argv[1:])
