"""Tests of the page `/docs` in headless Chromium, which is controlled with the DevTools protocol over two pipes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import accel
from accel.serving.http.app import create_app
from tests.auditing.servers import served
from tests.serving.conftest import save_chat

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


class Page:
    """A page of Chromium."""

    def __init__(self, read: Any, write: Any) -> None:
        self._read, self._write, self._count, self._session = read, write, 0, ""
        self._pending = b""

    def send(self, method: str, **parameters: Any) -> Any:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._pending:
                part = os.read(self._read, 1 << 16)
                assert part, "Chromium has ended"
                self._pending += part
            text, _, self._pending = self._pending.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str) -> None:
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.navigate", url=url)
        self.wait("document.querySelectorAll('#endpoint option').length > 0")

    def value(self, script: str) -> Any:
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str) -> None:
        deadline = time.monotonic() + 30
        while not self.value(script):
            assert time.monotonic() < deadline, (script, self.value("document.body.innerText"))
            time.sleep(0.05)

    def run(self, path: str, body: dict[str, Any]) -> str:
        """Run a request with the page, and return the HTML of the result."""
        self.value(f"$('endpoint').value = {json.dumps(path)}; show()")
        self.value(f"$('body').value = {json.dumps(json.dumps(body))}; $('run').click()")
        self.wait("!$('run').disabled && /\\d+ in/.test($('status').textContent)")
        assert self.value("$('status').className") == "", self.value("$('status').textContent")
        return str(self.value("$('view').innerHTML"))


@pytest.fixture(scope="module")
def page(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Callable[..., Path], shared: Callable[..., Path]
) -> Iterator[Page]:
    tasks = ("text-classification", "token-classification", "question-answering", "sentence-similarity")
    models: dict[str, Any] = {
        task: accel.ORTModel.from_pretrained(tiny_folder("bert", task), backend="pytorch", task=task) for task in tasks
    }
    models["chat"] = accel.ORTModel.from_pretrained(shared("served-chat", save_chat), backend="pytorch")
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    profile = tmp_path_factory.mktemp("chromium")
    assert CHROMIUM is not None
    command = (
        f"exec {CHROMIUM} --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe "
        f"--user-data-dir={profile} about:blank 3<&{in_read} 4>&{out_write}"
    )
    process = subprocess.Popen(
        ["bash", "-c", command], pass_fds=(in_read, out_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(in_read)
    os.close(out_write)
    opened = Page(out_read, in_write)
    with served(create_app(accel.Engine(models))) as url:
        try:
            opened.open(f"{url}/docs")
            yield opened
        finally:
            with contextlib.suppress(OSError, AssertionError):
                opened._session = ""
                opened.send("Browser.close")
            process.wait(30)
            os.close(out_read)
            os.close(in_write)


def test_probabilities_as_bars(page: Page) -> None:
    html = page.run("/classify", {"inputs": "I lost my card", "model": "text-classification"})
    assert html.count('class="bar"') >= 1
    assert "LABEL_" in html


def test_similarities_as_a_table(page: Page) -> None:
    page.run("/embed", {"inputs": ["my card", "my bank", "help"], "model": "sentence-similarity"})
    cells = page.value("[...document.querySelectorAll('#view td')].map(cell => Number(cell.textContent))")
    assert len(cells) == 9
    assert [cells[0], cells[4], cells[8]] == [1, 1, 1]


def test_answer_is_marked_in_its_context(page: Page) -> None:
    context = "my card is in the bank"
    page.run("/answer" if page.value("endpoints.some(e => e.path === '/answer')") else page.value(
        "endpoints.find(e => 'context' in e.example).path"
    ), {"question": "where is my card", "context": context, "model": "question-answering"})  # fmt: skip
    assert page.value("document.querySelector('#view p').textContent") == context
    assert page.value("document.querySelectorAll('#view mark').length") == 1


def test_entities_are_marked(page: Page) -> None:
    page.value(
        "$('view').replaceChildren(...view([{entity_group: 'PER', word: 'Bo', score: .9, start: 3, end: 5}], {inputs: 'Hi Bo!'}))"
    )
    assert page.value("$('view').innerHTML") == "<p>Hi <mark>Bo<small>PER</small></mark>!</p>"


def test_text_is_never_read_as_html(page: Page) -> None:
    text = "<img src=x onerror=alert(1)>"
    page.value(f"$('view').replaceChildren(...view([{{label: {json.dumps(text)}, score: 1}}], {{inputs: 'a'}}))")
    assert page.value("document.querySelectorAll('#view img').length") == 0


def test_conversation_with_streaming_and_stop(page: Page) -> None:
    page.value("$('endpoint').value = CHAT; show()")
    page.value(
        "$('body').value = '{\"max_tokens\": 4, \"ignore_eos\": true}'; $('message').value = 'help'; $('run').click()"
    )
    page.wait("!$('run').disabled && $('status').textContent.startsWith('200')")
    assert page.value("[...document.querySelectorAll('#chat p')].length") == 2
    assert page.value("document.querySelector('#chat p:nth-child(2) span').textContent.length") > 0
    assert page.value("history.map(message => message.role)") == ["user", "assistant"]
    page.value(
        "$('body').value = '{\"max_tokens\": 150, \"ignore_eos\": true}'; $('message').value = 'help'; $('run').click()"
    )
    assert page.value("$('stop').disabled") is False
    page.value("$('stop').click()")
    page.wait("!$('run').disabled")
    assert page.value("$('status').textContent") == "Stopped."


def test_code_of_the_same_call(page: Page) -> None:
    page.value(
        "$('endpoint').value = '/classify'; show(); $('body').value = '{\"inputs\": \"it\\'s\", \"top_k\": null}'; code()"
    )
    shown = {}
    for language in ("curl", "python", "javascript"):
        page.value(f"$('language').value = '{language}'; code()")
        shown[language] = page.value("$('code').textContent")
    assert '-d \'{"inputs":"it\'\\\'\'s","top_k":null}\'' in shown["curl"]
    compile(shown["python"], "example", "exec")
    assert '"top_k":None' in shown["python"]
    assert (
        page.value(
            f"void new (Object.getPrototypeOf(async function(){{}}).constructor)({json.dumps(shown['javascript'])})"
        )
        is None
    )
    process = subprocess.run(["bash", "-c", shown["curl"]], capture_output=True, text=True, timeout=60, check=False)
    if shutil.which("curl"):
        assert '"label"' in process.stdout


def test_live_numbers(page: Page) -> None:
    page.run("/classify", {"inputs": "help", "model": "text-classification"})
    page.wait("$('flight').textContent !== '–'")
    assert page.value("/^[0-9.]+$/.test($('rate').textContent)")


def test_every_control_has_a_name_and_the_page_loads_nothing_else(page: Page) -> None:
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    controls = [node for node in nodes if node.get("role", {}).get("value") in ("button", "textbox", "combobox")]
    assert len(controls) >= 6
    assert all(node["name"]["value"] for node in controls)
    origins = page.value(
        "[...new Set(performance.getEntriesByType('resource').map(each => new URL(each.name).origin))]"
    )
    assert origins == [page.value("location.origin")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_contrast(page: Page, scheme: str) -> None:
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    script = """(() => {
      const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
      const light = text => {
        const [r, g, b] = text.match(/[0-9.]+/g).map(v => linear(v / 255));
        return .2126 * r + .7152 * g + .0722 * b;
      };
      const style = getComputedStyle($('run')), a = light(style.color), b = light(style.backgroundColor);
      return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    })()"""
    assert page.value(script) >= 4.5  # WCAG AA
