"""docs/distributed.md: its code runs on two gloo processes and on eight host devices of JAX.

The page also has a table of what is refused, with words of the errors. They are found in the errors
that are raised, on each process, in the order of the table.
"""

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.repo import pages

from .test_distributed import on_processes

PAGE = (pages.DOCS / "distributed.md").read_text()
TORCH, _, IN_JAX = PAGE.partition("\n## In JAX\n")
TABLE = [row.split(" | ") for row in re.findall(r"^\| (?!what \|)(.*) \|$", PAGE, re.MULTILINE)]
WORDS = {what: re.findall("`([^`]+)`", error) for what, error, _ in TABLE}
*OF_TORCH, EXPLICIT = WORDS
EXPLICIT_AXES = """
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
rows = NamedSharding(mesh, P("data"))
try:
    with jax.set_mesh(mesh):
        jax.jit(jax.grad(loss))(jax.device_put(params, rows), jax.device_put(x, rows))
except Exception as error:
    print(error)
"""


def program(text, path):
    """A file with the blocks of a text, as one program."""
    path.write_text("\n".join(pages.blocks(text)))
    return str(path)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if not torch.distributed.is_gloo_available():
        pytest.skip("this build of torch has no gloo")
    assert len(pages.blocks(TORCH)) == 7
    code = program(TORCH, tmp_path_factory.mktemp("page") / "page.py")
    return on_processes(2, [code], "the_page.py")  # with the page's own assertions


@pytest.mark.parametrize("row", range(len(OF_TORCH)), ids=OF_TORCH)
def test_what_the_page_says_is_refused_is_refused_in_its_words(found, row):
    for results in found:
        assert len(results["refused"]) == len(OF_TORCH)
        for said in results["refused"][row]:
            assert WORDS[OF_TORCH[row]]
            assert all(words in said for words in WORDS[OF_TORCH[row]]), said


def test_a_policy_that_keeps_the_results_of_collectives_saves_those_of_the_replays(found):
    for results in found:
        assert results["collectives"] == [12, 8]  # of four blocks; without regions 8


def test_the_code_for_jax_runs_on_eight_devices_and_explicit_axes_are_refused(tmp_path):
    pytest.importorskip("jax")
    path = tmp_path / "page.py"
    assert len(pages.blocks(IN_JAX)) == 4
    program(IN_JAX, path)
    path.write_text(path.read_text() + EXPLICIT_AXES)
    flags = f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    assert WORDS[EXPLICIT]
    assert all(words in run.stdout for words in WORDS[EXPLICIT]), run.stdout
