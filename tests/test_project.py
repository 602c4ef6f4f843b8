"""What stands around the package: its metadata, its workflows, and the versions that it was tested with."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import rlsprune
from lock import own_requirements

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def versions(name: str) -> dict[str, str]:
    """Of a file of pinned requirements."""
    lines = (ROOT / "tests" / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


@pytest.mark.parametrize("text", sorted(set(own_requirements(["dev"]))))
def test_bounds_hold_what_was_tested(text: str) -> None:
    requirement = Requirement(text)
    tested = versions("newest.txt").get(canonicalize_name(requirement.name))
    assert tested, "not in tests/newest.txt: run `make lock`"
    assert requirement.specifier.contains(tested, prereleases=True)


@pytest.mark.parametrize("text", PROJECT["project"]["dependencies"])
def test_core_bounds_are_the_oldest_and_newest_tested(text: str) -> None:
    requirement = Requirement(text)
    lower = next(Version(part.version) for part in requirement.specifier if part.operator == ">=")
    upper = next(Version(part.version) for part in requirement.specifier if part.operator == "<")
    oldest, newest = (Version(versions(name)[requirement.name]) for name in ("oldest.txt", "newest.txt"))
    assert oldest.release[: len(lower.release)] == lower.release, "make test-oldest runs with the lower bound"
    assert lower <= newest < upper


def test_the_constraint_is_the_torch_that_was_tested() -> None:
    assert (ROOT / "constraints.txt").read_text(encoding="utf-8").strip() == f"torch=={versions('newest.txt')['torch']}"


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "src/rlsprune/__init__.py"
    assert re.search(rf"^## (Unreleased|{re.escape(rlsprune.__version__)})", changelog(), re.MULTILINE)


def changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def hook() -> object:
    pytest.importorskip("hatchling")
    specification = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


TEXT = "![The idea](docs/idea.png)\n\n[a page](docs/a.md#b), [a site](https://example.org)"


def test_readme_on_an_index(hook: object) -> None:
    changed = hook.readme_on_an_index(TEXT, "https://example.org/owner/name", "v1.2")
    assert "![The idea](https://example.org/owner/name/raw/v1.2/docs/idea.png)" in changed
    assert "[a page](https://example.org/owner/name/blob/v1.2/docs/a.md#b), [a site](https://example.org)" in changed
    assert hook.readme_on_an_index(TEXT, None, "v1.2").strip() == "a page, [a site](https://example.org)"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for repository in (None, "https://example.org/owner/name"):
        assert not re.search(r"\]\((?!https?:)", hook.readme_on_an_index(readme, repository, "v1.2"))


def test_no_address_is_invented(hook: object) -> None:
    assert hook.links(None, "v1.2") == {}
    assert set(hook.links("https://example.org/owner/name", "v1.2")) == {"Repository", "Issues", "Changelog"}
    assert PROJECT["project"]["authors"] == [{"name": "The rlsprune authors"}]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}, "no job may write unless it says so"
    assert workflow[True]  # `on`, which YAML reads as a truth value
    for job in workflow["jobs"].values():
        assert job["runs-on"] == "ubuntu-latest"
        assert set([job["needs"]] if "needs" in job else []) <= set(workflow["jobs"])
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[\w/.]+", step["uses"])
            elif step["run"].startswith("make "):
                assert step["run"].removeprefix("make ") in TARGETS


def test_workflows_cover_the_oldest_and_the_newest() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))["jobs"]
    lowest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert jobs["newest"]["strategy"]["matrix"]["python"][0] == lowest
    assert jobs["oldest"]["steps"][1]["with"]["python-version"] == lowest
    assert {step.get("run") for job in jobs.values() for step in job["steps"]} >= {
        "make test",
        "make test-oldest",
        "make wheel",
        "make docs",
    }


def test_release_is_by_trusted_publishing() -> None:
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    assert release["jobs"]["build"]["env"]["RLSPRUNE_REPOSITORY"].startswith("${{ github.server_url }}")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_form(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(form)
    identifiers = [part["id"] for part in form["body"]]
    assert len(set(identifiers)) == len(identifiers)
    assert all(part["attributes"]["label"] for part in form["body"])


def test_pre_commit_runs_what_make_lint_runs() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    hooks = {hook["entry"].removesuffix(" --fix") for hook in repository["hooks"]}
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").split("\nlint:")[1].split("\n\n")[0]
    used = set(re.findall(r"\$\(BIN\)/(ruff check|ruff format|mypy)", recipe))
    assert hooks == used


def test_citation() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert "version" not in citation, "the version stands in one place"
    paper = citation["preferred-citation"]
    assert [author["family-names"] for author in paper["authors"]] == ["Yu", "Zhang", "Wang", "Ma", "Song"]
    assert paper["url"] == "https://arxiv.org/abs/2201.04813"
