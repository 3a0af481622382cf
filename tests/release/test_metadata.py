"""What a package index shows: the version, the licence, and a README whose links lead somewhere."""

import re
from pathlib import Path

import pytest
import yaml
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import sgdol

ROOT = Path(__file__).parents[2]
RELATIVE = re.compile(r"\]\((?!https?:)")
"""The middle of a link that has no scheme."""


@pytest.fixture
def declared(monkeypatch):
    """The metadata that a build makes, where the repository is at an address or at none."""

    def build(url: str | None = None, ref: str | None = None, docs: str | None = None):
        for name, value in {"SGDOL_URL": url, "SGDOL_REF": ref, "SGDOL_DOCS": docs}.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        return ProjectMetadata(str(ROOT), PluginManager()).core

    return build


def test_without_an_address_none_is_declared_and_no_link_is_broken(declared):
    metadata = declared()
    assert list(metadata.urls) == ["Paper"]
    assert not RELATIVE.search(metadata.readme)
    assert "![" not in metadata.readme


def test_with_an_address_every_link_leads_to_a_file_of_the_tag(declared):
    metadata = declared("https://host.example/us/sgdol/", "v1.2.3", "https://us.example/sgdol/")
    assert metadata.urls["Source"] == "https://host.example/us/sgdol"
    assert metadata.urls["Documentation"] == "https://us.example/sgdol/"
    assert not RELATIVE.search(metadata.readme)
    named = re.findall(r"\]\(https://host\.example/us/sgdol/(blob|raw)/v1\.2\.3/([^)#]+)", metadata.readme)
    assert {kind for kind, _ in named} == {"blob", "raw"}
    assert all((ROOT / path).is_file() for _, path in named)


def test_images_are_shown_from_the_tag_as_they_are(declared):
    readme = declared("https://host.example/us/sgdol", "v1.2.3").readme
    images = re.findall(r"!\[[^\]]*\]\((.*?)\)", readme)
    assert len(images) == (ROOT / "README.md").read_text(encoding="utf-8").count("![") > 0
    assert all("/raw/v1.2.3/" in image for image in images)


def test_code_in_the_readme_is_left_as_it_is(declared):
    code = re.compile(r"^```.*?^```$", flags=re.M | re.S)
    assert code.findall(declared().readme) == code.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def test_the_version_is_that_of_the_package_the_citation_and_the_changelog():
    assert ProjectMetadata(str(ROOT), PluginManager()).version == sgdol.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == sgdol.__version__
    assert f"## {sgdol.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_licence_of_the_data_is_declared_with_its_file(declared):
    metadata = declared()
    assert metadata.license_expression == "Apache-2.0 AND CC-BY-4.0"
    assert metadata.license_files == ["LICENSE", "src/sgdol/paper/adult.txt"]


def test_every_python_that_is_declared_is_tested_by_the_workflow(declared):
    versions = {name.rsplit(" ", 1)[1] for name in declared().classifiers if re.search(r":: 3\.\d+$", name)}
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))["jobs"]
    assert {*jobs["tests"]["strategy"]["matrix"]["python"]} == versions


def test_what_only_developers_need_is_no_extra(declared):
    assert {*declared().optional_dependencies} == {
        "torch", "jax", "paper", "trainers", "tensorboard", "private", "plot",
    }  # fmt: skip
