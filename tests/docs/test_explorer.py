"""The explorer page, in a headless Chromium: its answers are those of ``explain``, and it works as a page.

There is no server: the browser opens a file. Without a Chromium on the path these tests are skipped. The page in the
site around it is in test_site.py.
"""

from __future__ import annotations

import json
import pathlib
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import browser
import pytest
from repository import ROOT

import fusedops
import fusedops_eager
from fusedops._plugins.registry import registry

needs_browser = pytest.mark.skipif(
    browser.find() is None, reason="no Chromium on the path: the explorer page is not tested; apt-get install chromium"
)


@pytest.fixture(scope="session")
def run(program: Any) -> Callable[..., str]:
    """Run a script of the project as a user does, and return its output."""
    path = [pathlib.Path(module.__file__ or "").parents[1] for module in (fusedops, fusedops_eager)]

    def run(*command: object) -> str:
        done = program(*command, path=path, folder=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, run: Callable[..., str]) -> Iterator[browser.Page]:
    """Return a browser with the page alone, without the site around it."""
    file = tmp_path_factory.mktemp("explorer") / "explore.html"
    run("docs/make_explorer.py", file)
    with browser.opened() as opened:
        opened.open(file)
        opened.run(browser.EXPLORER)
        yield opened


# --------------------------------------------------------------------------------------------------------- its answers


@needs_browser
@pytest.mark.parametrize(
    ("count", "seed", "way"),
    [(60, "d", "answers"), pytest.param(600, "many", "answersWithoutLayout", marks=pytest.mark.slow)],
    ids=["60", "600"],
)
def test_the_page_answers_as_explain_does(
    page: browser.Page, run: Callable[..., str], count: int, seed: str, way: str
) -> None:
    calls = [json.loads(line) for line in run("tests/support/makers/explorer_calls.py", str(count), seed).splitlines()]
    assert len(calls) == count
    answers = page.run(f"{way}({json.dumps([call['fragment'] for call in calls])})")
    for call, answer in zip(calls, answers, strict=True):
        expected = call["expected"]
        for candidate in expected.get("candidates", ()):  # the page shows those of a backend that may serve the call
            candidate["deviations"] = [] if candidate["reasons"] else candidate["deviations"]
        assert answer == expected, call["fragment"]
    assert not page.errors
    served = {call["expected"]["backend"] for call in calls if "error" not in call["expected"]}
    own = {record.backend.name for record in registry.records() if record.distribution == "fusedops"}
    assert served >= own, "the calls are to reach every backend"
    assert any("error" in call["expected"] for call in calls)


# ------------------------------------------------------------------------------------------------------------ as a page


@needs_browser
def test_an_edit_changes_the_answer_and_the_address(page: browser.Page) -> None:
    fragment = "#op=scaled_masked_softmax&device=npu&x=2,8,128,100:float16&mask=None&scale=0.125"
    assert browser.answer_of(page, fragment)["backend"] == "eager"
    page.run("""
        const shape = document.querySelector("#explorer-x");
        shape.value = "2,8,128,128";
        shape.dispatchEvent(new Event("input", { bubbles: true }));
    """)
    assert page.run("document.querySelector('.strip').dataset.forward") == "npu"
    address = page.run("location.hash")
    assert "x=2,8,128,128:float16" in address
    assert browser.answer_of(page, "#op=bias_gelu&device=cpu&x=2,8:float32")["backend"] == "cpu"
    assert browser.answer_of(page, address)["backend"] == "npu"


@needs_browser
def test_the_example_is_the_one_that_is_shown(page: browser.Page) -> None:
    shown = "document.querySelector('#explorer-example').selectedOptions[0].textContent"
    for op in ("rms_norm", "attention", "linear_cross_entropy"):
        browser.answer_of(page, f"#op={op}&device=cpu")
        first = page.run("document.querySelector('#explorer-example').options[1].textContent")
        assert page.run(shown) == first
        page.run("""((argument) => {
            argument.value = "3,5,7,11";
            argument.dispatchEvent(new Event("input", { bubbles: true }));
        })(document.querySelector("#call-explorer > .details input"))""")
        assert page.run(shown) == "another call"


@needs_browser
@pytest.mark.parametrize(
    "fragment",
    [
        "#op=attention&device=cuda&q=2,8,9,64:float16&k=2,2,9,64:float16&v=2,2,9,64:float16&window=(3, 1)&causal=True",
        "#op=rms_norm&device=npu&x=8,512:bfloat16&weight=512:float32&offset=1.0&policy=eager,auto&fallback=silent",
        "#op=bias_gelu&device=cuda&x=8,512:float16&bias=None&approximate=none&capability=7.5&adapt=pad",
    ],
)
def test_the_call_as_python_and_as_a_command_gives_the_same_answer(
    page: browser.Page, run: Callable[..., str], fragment: str
) -> None:
    answer = browser.answer_of(page, fragment)
    python, command = (
        page.run(f"document.querySelector('#call-explorer pre{of}').textContent") for of in ("", ".command")
    )
    program, *words = shlex.split(command)
    assert program == "fusedops"
    code = f"""
import json
from fusedops import _explain
from fusedops._cli.main import main
_explain._is_here = lambda device: False
{python.replace("print(decision)", "print(json.dumps(decision.to_dict()))")}
main({[*words, "--json"]})
"""
    decoder, output = json.JSONDecoder(), run("-c", code)
    first, end = decoder.raw_decode(output)
    for decision in (first, json.loads(output[end:])):
        for key in ("given", "backend", "backward"):
            assert decision[key] == answer[key]


@needs_browser
def test_backends_of_other_devices_are_on_one_line(page: browser.Page) -> None:
    browser.answer_of(page, "#op=swiglu&device=cpu&gate=8,64:float32")
    chain = "document.querySelector('#call-explorer > .chain')"
    assert page.run(f"[...{chain}.querySelectorAll('.others')].map(each => each.textContent)") == [
        "For other devices: npu, triton, flash_attn",
        "Without a kernel for it: zentorch, sdpa",
    ]
    assert page.run(f"{chain}.querySelectorAll('.badge.refused').length") == 0
    browser.answer_of(page, "#op=swiglu&device=cpu&gate=8,64:float32&policy=npu")
    assert page.run(f"{chain}.querySelector('.badge.refused').parentElement.textContent") == "npurefused"


@needs_browser
@pytest.mark.parametrize(
    ("fragment", "text"),
    [
        ("#op=rms_norm&device=cpu&x=8,a", "got x '8,a', expected sizes; to fix: write them like 8,16,512,512"),
        ("#op=rms_norm&device=cpu&x=8:f", "got dtype 'f' of x, expected one of float16"),
        ("#op=rms_norm&device=cpu&x=8&policy=nixon", "got backend 'nixon', expected one of npu, triton"),
        ("#op=rms_norm&device=cpu&x=8&policy=relu%3Dnpu", "got op 'relu', expected one of"),
        ("#op=rms_norm&device=cpu&x=8&policy=npu;cpu", "which has two orders for every op"),
        ("#op=rms_nrom&device=cpu&x=8", "got op 'rms_nrom', expected one of"),
        (
            "#op=rms_norm&device=cpu&x=8&gamma=8",
            "got argument of rms_norm 'gamma', expected one of x, weight, eps, offset",
        ),
        ("#op=rms_norm&device=cuda&x=8&capability=9", "got compute capability '9', expected two numbers"),
        (
            "#op=rms_norm&device=cpu&x=8&eps=<b>a</b>",
            "rms_norm: got eps = '<b>a</b>', expected a Python number of at least 0, finite in float32",
        ),
    ],
)
def test_a_text_that_cannot_be_read_is_an_error_on_the_page(page: browser.Page, fragment: str, text: str) -> None:
    assert text in browser.answer_of(page, fragment)["error"]
    shown = page.run("document.querySelector('#call-explorer > .strip').textContent")
    assert shown.startswith("Invalid on every backend" if text.startswith("rms_norm") else "This call cannot be read")
    assert text.removeprefix("rms_norm: ").removeprefix("got ")[:20] in shown


@needs_browser
def test_the_page_works_with_the_keyboard(page: browser.Page) -> None:
    browser.answer_of(page, "#op=bias_gelu&device=cpu&x=8,64:float32&bias=64:float32")
    page.run("document.activeElement.blur()")
    reached = []
    for _ in range(40):
        page.press("Tab", 9)
        reached.append(page.run("document.activeElement.id || document.activeElement.textContent"))
    controls = page.run(
        "[...document.querySelectorAll('#call-explorer :is(input, select, button)')].map(e => e.id || e.textContent)"
    )
    assert {each for each in controls if each} <= set(reached)
    for control in ("explorer-op", "explorer-device"):
        page.run(f"document.getElementById('{control}').focus()")
        for _ in range(2):  # the focus stays on the control, although the form is made again
            before = page.run("location.hash")
            page.press("ArrowDown", 40)
            assert page.run("document.activeElement.id") == control
            assert page.run("location.hash") != before
    assert "&device=npu&" in page.run("location.hash")


@needs_browser
@pytest.mark.parametrize(
    ("fragment", "name"),
    [
        ("#op=rms_norm&device=cuda&x=8,4000:bfloat16&weight=None", "weight"),
        ("#op=attention&device=cuda&q=2,8,9,64:float16&k=2,2,9,64:float16&v=2,2,9,64:float16&mask=None", "mask"),
        ("#op=linear_cross_entropy&device=cuda&x=7,32:float32&weight=99,32:float32&target=7:int64&bias=None", "bias"),
    ],
)
def test_an_optional_tensor_that_is_added_makes_a_valid_call(page: browser.Page, fragment: str, name: str) -> None:
    before = browser.answer_of(page, fragment)
    page.run(f"document.querySelector('[aria-label=\"{name} is given\"]').click()")
    after = browser.answer_of(page, page.run("location.hash"))
    assert f"{name} None" in before["given"]
    assert f"{name} None" not in after["given"]


@needs_browser
def test_every_control_has_a_name(page: browser.Page) -> None:
    nameless = """
        [...document.querySelectorAll("#call-explorer :is(input, select)")]
            .filter((each) => !each.labels.length && !each.getAttribute("aria-label"))
            .map((each) => each.outerHTML)
    """
    for op in fusedops.ops.__all__:
        browser.answer_of(page, f"#op={op}&device=cpu")
        assert page.run(nameless) == []
