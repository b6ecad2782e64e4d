"""What a package index shows: the extras, the URLs, and a README without links that lead nowhere there."""

from __future__ import annotations

import email
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from repository import ROOT, load

pytest.importorskip("hatchling")

CONFIG = {"repository": "https://code.example/fusedops/", "file": "{repository}/blob/v{version}/{path}"}
LINK = re.compile(r"\[[^\]]+\]\(([^()\s]+)\)")


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    return load(ROOT / "hatch_metadata.py")


def test_with_an_address_every_link_is_absolute(hook: ModuleType) -> None:
    metadata: dict[str, Any] = {"version": "1.2.3"}
    hook.Urls(str(ROOT), CONFIG).update(metadata)
    base = "https://code.example/fusedops"
    assert metadata["urls"]["Repository"] == base
    targets = LINK.findall(metadata["readme"]["text"]) + list(metadata["urls"].values())[1:]
    assert f"{base}/blob/v1.2.3/docs/start.md" in targets
    for target in targets:
        start = f"{base}/blob/v1.2.3/"
        assert target.startswith(start), target
        assert (ROOT / re.split("[#?]", target.removeprefix(start))[0]).exists(), target
    assert f"]({base}/blob/v1.2.3/docs/_static/speed.svg?raw=true)" in metadata["readme"]["text"]


def test_the_readme_clones_the_address_of_pyproject() -> None:
    (address,) = re.findall(r'^repository = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    (cloned,) = re.findall(r"^git clone (.+) fusedops &&", (ROOT / "README.md").read_text("utf-8"), re.M)
    assert cloned == (address or "<the address of this repository>")


def test_code_and_links_on_the_network_stay(hook: ModuleType) -> None:
    text = "[a](b.md) `[c](d.md)` [e](https://f.g) [h](#i)\n```md\n[j](k.md)\n```\n[l](m.md#n)\n"
    changed = "a (b.md) `[c](d.md)` [e](https://f.g) [h](#i)\n```md\n[j](k.md)\n```\nl (m.md#n)\n"
    assert hook.without_relative_links(text, None) == changed
    assert hook.without_relative_links(text, "https://x.y/{path}") == text.replace(
        "(b.md)", "(https://x.y/b.md)"
    ).replace("(m.md#n)", "(https://x.y/m.md#n)")


def test_a_picture_is_its_file_or_is_left_out(hook: ModuleType) -> None:
    text = "a\n\n![four steps](docs/b.svg)\n\nc ![d](https://e.f/g.svg)\n"
    assert hook.without_relative_links(text, None) == "a\n\n\n\nc ![d](https://e.f/g.svg)\n"
    assert "![four steps](https://x.y/docs/b.svg?raw=true)" in hook.without_relative_links(text, "https://x.y/{path}")


def test_the_metadata_that_is_built_have_the_extras_and_the_page(tmp_path: Path) -> None:
    code = f"from hatchling.build import prepare_metadata_for_build_wheel as make; make({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*/METADATA")
    metadata = email.message_from_string(file.read_text("utf-8"))
    assert set(metadata.get_all("Provides-Extra", [])) == {"triton", "npu", "transformers", "megatron", "zentorch"}
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = str(metadata.get_payload())
    assert "# fusedops" in page
    addresses = [value.partition(", ")[2] for value in metadata.get_all("Project-URL", [])]
    assert all(address.startswith("https://") for address in addresses)
    relative = [target for target in LINK.findall(page) if not target.startswith("https://")]
    assert not relative
