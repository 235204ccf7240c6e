"""Prints the constraints of an environment: ``python tools/constraints.py NAME``.

``pinned`` gives constraints.txt unchanged. The other names change the lines of torch and JAX in it:
``oldest`` takes the lower bounds of pyproject.toml, ``newest`` leaves both open, and a version
number is a version of torch, with JAX as pinned. It needs nothing but the standard library, because
it runs before anything is installed.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIBRARIES = ("torch", "jax", "jaxlib")


def lower_bounds():
    """``name==version`` for each lower bound of what functx itself and its JAX extra need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["jax"]]
    return [re.sub(r"^([\w-]+)>=([\d.]+)$", r"\1==\2", requirement) for requirement in needed]


def constraints(versions, text):
    """The constraints of that name, made from the text of constraints.txt.

    Raises:
        ValueError: It is neither a known name nor a version number.
    """
    if versions == "pinned":
        return text
    lines = text.splitlines()
    if versions == "oldest":
        replaced, instead = LIBRARIES, lower_bounds()
    elif versions == "newest":
        replaced, instead = LIBRARIES, []
    elif re.fullmatch(r"\d+(\.\d+)+", versions):
        replaced, instead = ("torch",), [f"torch=={versions}"]
    else:
        raise ValueError(
            f"VERSIONS={versions}: give pinned, oldest, newest, or a version of torch such as "
            "2.12.1."
        )
    kept = [line for line in lines if line.split("==")[0] not in replaced]
    return "\n".join([*kept, *instead]) + "\n"


if __name__ == "__main__":
    try:
        print(constraints(sys.argv[1], (ROOT / "constraints.txt").read_text()), end="")
    except ValueError as error:
        sys.exit(str(error))
