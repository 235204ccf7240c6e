"""The parts of a release agree: version, address, supported versions, extras, workflows, sdist.

Each fact is written in one place, and the copies that some formats need are compared with it. A
command or a path that a workflow or a page names has to exist.
"""

import json
import re
import tomllib
from fnmatch import fnmatch

import pytest

import functx
from tools import compatibility, constraints, smoke

from . import house, pages

PROJECT = tomllib.loads((house.ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
WORKFLOWS = sorted((house.ROOT / ".github" / "workflows").glob("*.yml"))
MADE = (".git", "PKG-INFO", "setup.cfg")  # the last two by setuptools, in an sdist
IGNORED = [line.strip("/") for line in (house.ROOT / ".gitignore").read_text().splitlines()]


def top_level():
    """Entries at the top of this repository, or of an sdist, except those that are made there."""
    for path in sorted(house.ROOT.iterdir()):
        if path.name not in MADE and not any(fnmatch(path.name, name) for name in IGNORED):
            yield path


def own_files():
    """The files of these entries."""
    for top in top_level():
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            # (Caches of tools hold whatever the tools have read.)
            is_cached = any(part.endswith(("_cache", "__pycache__")) for part in path.parts)
            if path.is_file() and not is_cached:
                yield path


def test_the_version_is_written_in_one_place():
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "functx.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", functx.__version__)
    assert (
        f'\n__version__ = "{functx.__version__}"\n'
        in (house.ROOT / "functx" / "__init__.py").read_text()
    ), "setuptools reads a plain string without importing torch"


def test_citation_and_release_notes_have_that_version():
    citation = (house.ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == functx.__version__
    assert re.search(r"^license: (.*)$", citation, re.MULTILINE)[1] == PROJECT["project"]["license"]
    notes = (house.ROOT / "CHANGELOG.md").read_text()
    first = re.search(r"^## (.*)$", notes, re.MULTILINE)[1]
    assert first == "Unreleased" or first.startswith(f"{functx.__version__}, ")


def test_each_release_says_what_to_change_in_your_code():
    _, *releases = re.split(r"^## ", (house.ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert releases
    assert not [notes.partition("\n")[0] for notes in releases if "**Migration.**" not in notes]


def test_nothing_but_pyproject_names_the_address_of_the_repository():
    (address,) = PROJECT["project"]["urls"].values()
    place = address.partition("://")[2].encode()
    naming = [path.name for path in own_files() if place in path.read_bytes()]
    assert naming == ["pyproject.toml"]


def test_the_oldest_supported_versions_are_said_alike():
    said = (house.ROOT / "docs" / "stability.md").read_text()
    python = PROJECT["project"]["requires-python"].removeprefix(">=")
    oldest = {"Python": python} | dict(line.split("==") for line in constraints.lower_bounds())
    oldest["JAX (optional)"] = oldest["jax"]
    for name in ("Python", "torch", "JAX (optional)"):
        assert f"| {name} | {oldest[name]} |" in said
    first = f"functx needs Python {python} and torch {oldest['torch']}, or newer."
    assert first in (house.ROOT / "docs" / "compatibility.md").read_text()
    listed = [c for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert listed[0].endswith(python)


def test_what_users_install_is_not_what_tests_of_models_need():
    """The `test` extra is what a user's own test suite needs; models come with another one."""
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in EXTRAS["test"]}
    assert not names & {"transformers", "diffusers", "flax"}
    assert "-e '.[test,models]'" in (house.ROOT / "Makefile").read_text()


@pytest.mark.parametrize("extra", ["core", *EXTRAS])
def test_each_extra_has_a_smoke_test_and_is_installed_by_a_workflow(extra):
    if extra == "cuda":  # what it installs needs a device
        assert extra not in smoke.CHECKS
        return
    assert extra in smoke.CHECKS
    tried = re.search(r"extra: \[(.*)\]", (WORKFLOWS[-1]).read_text())[1].split(", ")
    assert ('""' if extra == "core" else extra) in tried


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_step_of_a_workflow_can_be_typed(path):
    text = path.read_text()
    commands = re.findall(r"^ +(?:- )?run: (.*)$", text, re.MULTILINE)
    assert commands
    assert "|" not in commands, "a step is one line"
    makefile = (house.ROOT / "Makefile").read_text()
    for command in commands:
        assert "${{" not in command  # it goes through `env`, which a person can set too
        for target in re.findall(r"\bmake (?:-C \S+ )?(\w+)", command):
            assert f"\n{target}:" in makefile
    assert text.count("uses: actions/checkout@") == text.count("persist-credentials: false")
    assert "\npermissions:\n  contents: read\n" in text
    assert "secrets." not in text
    assert "\nconcurrency:\n" in text


def test_the_nightly_sweep_runs_every_folder_of_tests():
    text = (house.ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    swept = set(re.findall(r"tests/(\w+)", text))
    has = {path.parent.name for path in (house.ROOT / "tests").glob("*/__init__.py")}
    assert swept == has - {"gpu"}


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_what_a_page_at_the_top_names_exists(name):
    path = house.ROOT / name
    assert [link for link in pages.links(path) if not link.exists()] == []
    named = re.findall(r"`((?:functx|compat|docs|tests|tools|bench)/[\w./]+)`", path.read_text())
    assert [one for one in named if not (house.ROOT / one).exists()] == []
    typed = re.findall(r"\b(?:tests|docs)/[\w./]+\b", path.read_text())
    assert [one for one in typed if not (house.ROOT / one).exists()] == []


def test_the_manifest_names_what_exists_and_all_of_it():
    """An sdist has to be enough to run the tests and to build the wheel."""
    named = set()
    for line in (house.ROOT / "MANIFEST.in").read_text().splitlines():
        command, _, names = line.partition(" ")
        if command in ("graft", "include"):
            named |= set(names.split())
    assert [name for name in named if not (house.ROOT / name).exists()] == []
    by_itself = {"README.md", "LICENSE", "pyproject.toml", "MANIFEST.in"}
    assert {path.name for path in top_level()} - by_itself == named


def test_constraints_of_each_name():
    pinned = "# comment\ntorch==2.13.0\njax==0.10.2\njaxlib==0.10.2\nruff==0.17.5\n"
    assert constraints.constraints("pinned", pinned) == pinned
    oldest = constraints.constraints("oldest", pinned).splitlines()
    assert oldest[:2] == ["# comment", "ruff==0.17.5"]
    assert {line.split("==")[0] for line in oldest[2:]} == {"torch", "optree", "jax"}
    assert constraints.constraints("newest", pinned) == "# comment\nruff==0.17.5\n"
    one = constraints.constraints("2.12.1", pinned).splitlines()
    assert set(one) == set(pinned.replace("2.13.0", "2.12.1").splitlines())
    with pytest.raises(ValueError, match="VERSIONS=latest: give pinned, oldest, newest"):
        constraints.constraints("latest", pinned)


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.remat.test_a" name="test_one"/>
<testcase classname="tests.remat.test_a" name="test_two[x]"><failure message="no"/></testcase>
<testcase classname="tests.compat.to_jax.test_b" name="test_three"/>
<testcase classname="tests.models.test_c" name="test_four"><skipped
 message="could not import 'flax.linen': No module named 'flax'"/></testcase>
<testcase classname="tests.models.test_c" name="test_five"><error message="no fixture"/></testcase>
<testcase classname="" name="tests.compat.test_e"><skipped message="collection skipped"
 >('test_e.py', 9, "Skipped: could not import 'equinox': No module named 'equinox'")</skipped>
</testcase>
<testcase classname="tests.transforms.test_d" name="test_six"><skipped message="torch has no ..."/>
</testcase></testsuite></testsuites>"""


def test_a_record_counts_what_passed_and_says_why_something_did_not(tmp_path):
    (tmp_path / "junit.xml").write_text(JUNIT)
    compatibility.main(["record", str(tmp_path / "junit.xml"), "--out", str(tmp_path / "x.json")])
    record = json.loads((tmp_path / "x.json").read_text())
    assert record["passed"] == {"compat": 1, "models": 0, "remat": 1, "transforms": 0}
    failed = ["tests.models.test_c::test_five", "tests.remat.test_a::test_two[x]"]
    assert record["failed"] == failed
    reasons = ["equinox is not installed", "flax.linen is not installed", "torch has no ..."]
    assert record["skipped"] == dict.fromkeys(reasons, 1)
    assert record["versions"]["torch"]
    assert "+" not in record["versions"]["torch"]
    assert f"`{failed[0]}` fails" in compatibility.tables([record])


def record_of(torch, python, passed):
    versions = {"torch": torch, "python": python, "jax": None}
    return {"versions": versions, "passed": {"remat": passed}, "skipped": {}, "failed": []}


def test_a_newer_record_takes_the_place_of_one_of_the_same_environment():
    old, other = record_of("2.13.0", "3.11.7", 1), record_of("2.9.1", "3.11.7", 2)
    new = record_of("2.13.1", "3.11.9", 3)
    records = compatibility.merged(compatibility.merged([old], other), new)
    assert records == [other, new]  # by number, not by letters
    later = record_of("2.13.0", "3.12.0", 4)
    assert compatibility.merged(records, later) == [other, new, later]


def test_a_library_is_shown_only_where_tests_that_need_it_ran():
    record = record_of("2.13.0", "3.11.7", 5)
    record["versions"]["jax"] = "0.10.2"
    assert "0.10.2" not in compatibility.tables([record])
    record["passed"]["compat"] = 7
    assert "| 2.13.0 | 3.11.7 | 0.10.2 |" in compatibility.tables([record])


def test_the_page_shows_the_records():
    text = compatibility.PAGE.read_text()
    records = json.loads(compatibility.RECORDS.read_text())
    assert records
    assert compatibility.filled(text, records) == text, "run python -m tools.compatibility write"
