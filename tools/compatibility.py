"""Makes the tables of docs/compatibility.md from runs of the tests in several environments.

`make matrix` runs the tests in one environment and calls ``python -m tools.compatibility record``
with the Python of that environment, which writes build/compatibility.json. Then ``python -m
tools.compatibility write build/compatibility.json``, with one such file or several, puts the
records into docs/compatibility.json, and the tables into the page. A newer record takes the place
of an older one of the same minor versions of torch and Python.
"""

import argparse
import importlib.metadata
import json
import platform
import re
import sys
import xml.etree.ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
RECORDS = ROOT / "docs" / "compatibility.json"
MARKED = re.compile(r"(<!-- matrix -->\n).*?(<!-- end -->)", re.DOTALL)
LIBRARIES = ("torch", "jax", "transformers", "diffusers", "flax", "equinox")

# The folders of tests that use the others.
USING = ("compat", "models")


def installed(name):
    """The version of a library without its build, such as +cpu, or None."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def outcome(junit):
    """How many tests passed in each folder, which ones failed, and how many each reason skipped."""
    passed, failed, skipped = Counter(), [], Counter()
    for case in xml.etree.ElementTree.parse(junit).getroot().iter("testcase"):
        parts = (case.get("classname") or case.get("name")).split(".")
        folder = parts[1] if parts[0] == "tests" and len(parts) > 1 else parts[0]
        passed.setdefault(folder, 0)
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif (skip := case.find("skipped")) is not None:
            reason = skip.get("message", "").partition("\n")[0]
            # A file that is skipped as a whole has its reason in the text.
            missing = re.search(r"could not import '([\w.]+)'", f"{reason} {skip.text}")
            skipped[f"{missing[1]} is not installed" if missing else reason] += 1
        else:
            passed[folder] += 1
    found = {"passed": passed, "skipped": skipped}
    return {key: dict(sorted(counts.items())) for key, counts in found.items()} | {
        "failed": sorted(failed)
    }


def record(junit):
    """One environment: its versions, and the outcome of the tests in it."""
    versions = {"python": platform.python_version()}
    versions |= {name: installed(name) for name in LIBRARIES}
    return {"versions": versions, **outcome(junit)}


def minor(version):
    """The first two numbers of a version: 2.13 of 2.13.0."""
    return ".".join(version.split(".")[:2])


def order(one):
    """Environments are ordered by torch, then by Python; this is also what identifies them."""
    versions = one["versions"]
    return [tuple(map(int, minor(versions[name]).split("."))) for name in ("torch", "python")]


def merged(records, new):
    """The records with a new one, which takes the place of one of the same environment."""
    return sorted([*(one for one in records if order(one) != order(new)), new], key=order)


def row(*cells):
    """A line of a table."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def environment(one):
    """The name of a column."""
    return f"torch {minor(one['versions']['torch'])}, Python {minor(one['versions']['python'])}"


def tables(records):
    """Versions and counts of each environment, then the folders, then what was left out and why."""
    libraries = ("torch", "python", "jax", "transformers", "diffusers", "flax", "equinox")
    lines = [
        row(*libraries[:1], "Python", "JAX", *libraries[3:], "passed", "skipped", "failed"),
        row(*["---"] * len(libraries), *["---:"] * 3),
    ]
    for one in records:
        uses = {*libraries[:2]} if one["passed"].keys().isdisjoint(USING) else {*libraries}
        versions = [one["versions"].get(name) or "-" for name in libraries]
        versions = [version if name in uses else "-" for name, version in zip(libraries, versions)]
        counts = [sum(one[key].values()) for key in ("passed", "skipped")]
        lines.append(row(*versions, *(f"{n:,}" for n in counts), len(one["failed"])))
    lines += ["", "Tests that passed, by folder of `tests/`. A dash means that it was not run.", ""]
    lines += [
        row("folder", *(environment(one) for one in records)),
        row("---", *["---:"] * len(records)),
    ]
    for folder in sorted({folder for one in records for folder in one["passed"]}):
        counts = [one["passed"].get(folder, "-") for one in records]
        lines.append(row(f"`{folder}`", *(f"{n:,}" if n != "-" else n for n in counts)))
    lines += ["", "Tests that were skipped or failed, and why:", ""]
    for one in records:
        notes = [f"{reason} ({count})" for reason, count in one["skipped"].items()]
        notes += [f"`{name}` fails" for name in one["failed"]]
        lines.append(f"- {environment(one)}: {'; '.join(notes) or 'none'}.")
    return "\n".join(lines)


def filled(text, records):
    """The page with the tables of these records."""
    return MARKED.sub(lambda match: f"{match[1]}{tables(records)}\n{match[2]}", text)


def main(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(prog="tools.compatibility", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="write one environment's record")
    one.add_argument("junit", type=Path, help="what pytest --junitxml has written")
    one.add_argument("--out", type=Path, default=ROOT / "build" / "compatibility.json")
    all_of_them = commands.add_parser("write", help="put records into docs/")
    all_of_them.add_argument("records", type=Path, nargs="*")
    options = parser.parse_args(arguments)
    if options.command == "record":
        options.out.parent.mkdir(exist_ok=True, parents=True)
        options.out.write_text(json.dumps(record(options.junit), indent=1) + "\n")
        return
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else []
    for path in options.records:
        records = merged(records, json.loads(path.read_text()))
    RECORDS.write_text(json.dumps(records, indent=1) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), records))


if __name__ == "__main__":
    sys.exit(main())
