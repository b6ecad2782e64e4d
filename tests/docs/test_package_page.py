"""What a package index shows: the extras, the URLs, and a README without links that lead nowhere there."""

from __future__ import annotations

import email
import re
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest
from repository import ROOT

pytest.importorskip("hatch_fancy_pypi_readme")

README = (ROOT / "README.md").read_text("utf-8")
LINK = re.compile(r"\[([^\]]+)\]\(([^()\s]+)\)")


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    folder = tmp_path_factory.mktemp("metadata")
    code = f"from hatchling.build import prepare_metadata_for_build_wheel as make; make({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = Path(folder).glob("*/METADATA")
    return email.message_from_string(file.read_text("utf-8"))


def test_the_extras_and_the_addresses(metadata: Message) -> None:
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "triton",
        "npu",
        "transformers",
        "diffusers",
        "megatron",
        "zentorch",
    }
    assert metadata["Description-Content-Type"] == "text/markdown"
    addresses = [value.partition(", ")[2] for value in metadata.get_all("Project-URL", [])]
    assert all(address.startswith("https://") for address in addresses)


def test_a_link_to_a_file_is_its_text_and_path_and_the_others_stay(metadata: Message) -> None:
    page = str(metadata.get_payload())
    assert "# fusedops" in page
    files = [(text, target) for text, target in LINK.findall(README) if not re.match("[a-z]+:|#", target)]
    assert ("performance", "docs/performance.md") in files
    pictures = {target for _, target in re.findall(r"!\[([^\]]+)\]\(([^()\s]+)\)", README)}
    assert pictures
    assert all((f"{text} ({target})" in page) is (target not in pictures) for text, target in files)
    others = [f"[{text}]({target})" for text, target in LINK.findall(README) if (text, target) not in files]
    assert others == [f"[{text}]({target})" for text, target in LINK.findall(page)]


def test_code_stays(metadata: Message) -> None:
    """No code of the README looks like a link to a file: the substitutions would change it."""
    fences = re.findall("^```.*?^```$", README, re.M | re.S)
    words = re.findall(r"`[^`\n]+`", re.sub("^```.*?^```$", "", README, flags=re.M | re.S))
    assert fences
    assert words
    page = str(metadata.get_payload())
    assert [code for code in (*fences, *words) if code not in page] == []
