"""The chat page in a real browser: it streams, stops, begins anew, and reads on a phone, by day and by night."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .browser import BROWSER, Page, browsing
from .servers import Server, serving
from .tiny_model import tiny_model

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")

TEXTS = "[...document.querySelectorAll('article')].map((card) => card.textContent)"
IDLE = "!document.getElementById('send').hidden"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    model = tiny_model(folder / "tiny <b>model", context=4096)
    with serving(model, folder, "--api-key-env", "KEY", KEY="sesame") as running:
        yield running


@pytest.fixture
def page(server: Server, tmp_path: Path) -> Iterator[Page]:
    with browsing(tmp_path / "profile") as page:
        page.look(1000, 800, "light")
        page("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
        page.until("document.getElementById('state')?.textContent.includes('a key is needed')")
        page.run("document.querySelector('details').open = true; document.getElementById('key').focus()")
        page("Input.insertText", text="sesame")
        page.run("document.getElementById('text').focus()")
        page.until("document.title.startsWith('tiny')")
        page.said.clear()  # the refusal of before
        yield page
        assert page.said == []


def send(page: Page, text: str) -> None:
    page.run("document.getElementById('text').focus()")
    page("Input.insertText", text=text)
    page.key("Enter", 13, "\r")


def set_to(page: Page, name: str, value: str) -> None:
    page.run(
        f"document.getElementById('{name}').value = '{value}';"
        f"document.getElementById('{name}').dispatchEvent(new Event('input'))"
    )


def test_a_talk(page: Page, server: Server, tmp_path: Path) -> None:
    assert page.run("document.title + document.querySelectorAll('b').length") == "tiny <b>model0"
    set_to(page, "temperature", "0")
    set_to(page, "limit", "30")
    assert page.run("document.getElementById('shown').textContent") == "0"
    send(page, "<img src=x onerror=alert(1)>")
    page.until(f"{IDLE} && {TEXTS}.length === 2 && {TEXTS}[1].length > 5")
    first = page.run(TEXTS)
    assert first[0] == "<img src=x onerror=alert(1)>"
    assert page.run("document.images.length") == 0
    assert page.run("document.getElementById('state').textContent").startswith("30 tokens, ")
    body = {"model": "tiny <b>model", "messages": [{"role": "user", "content": first[0]}], "temperature": 0}
    key = {"Authorization": "Bearer sesame"}
    right = server.ask("/v1/chat/completions", body | {"max_tokens": 30}, headers=key)[1]
    assert first[1] == right["choices"][0]["message"]["content"]
    send(page, "fox")
    page.until(f"{IDLE} && {TEXTS}.length === 4 && {TEXTS}[3].length > 5")
    body["messages"] += [{"role": "assistant", "content": first[1]}, {"role": "user", "content": "fox"}]
    right = server.ask("/v1/chat/completions", body | {"max_tokens": 30}, headers=key)[1]
    assert page.run(f"{TEXTS}[3]") == right["choices"][0]["message"]["content"], "the talk goes along"
    if folder := os.environ.get("IRONFN_PICTURES"):
        for width, scheme in ((1000, "light"), (360, "dark")):
            page.look(width, 700, scheme)
            page.picture(Path(folder) / f"chat-{width}.png")


def test_stop_and_begin_anew(page: Page, server: Server) -> None:
    set_to(page, "temperature", "0")
    set_to(page, "limit", "4000")
    send(page, "fox")
    page.until(f"{TEXTS}[1]?.length > 20")
    assert page.run("document.activeElement.id") == "stop"
    page.run("document.getElementById('stop').click()")
    page.until(f"{IDLE} && document.getElementById('state').textContent === 'stopped'")
    server.idle()
    assert page.run(TEXTS)[0] == "fox"
    send(page, "dog")
    page.until(f"{TEXTS}[3]?.length > 20")
    page.run("document.getElementById('reset').click()")
    page.until(f"{IDLE} && {TEXTS}.length === 0")
    server.idle()
    page.until("turns.length === 0 && document.getElementById('state').textContent === 'stopped'")


@pytest.mark.parametrize(
    ("width", "scheme", "back"), [(340, "dark", "rgb(16, 19, 25)"), (1200, "light", "rgb(246, 247, 249)")]
)
def test_it_fits_and_shines(page: Page, width: int, scheme: str, back: str) -> None:
    page.look(width, 640, scheme)
    set_to(page, "limit", "60")
    send(page, "x" * 300)
    page.until(f"{IDLE} && {TEXTS}.length === 2")
    assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.run("document.querySelector('footer').getBoundingClientRect().bottom <= innerHeight")
    assert page.run("getComputedStyle(document.body).backgroundColor") == back
    assert page.run("getComputedStyle(document.getElementById('text')).fontSize") == "16px", "no phone zooms in"


def test_what_slipped_in_would_not_run(page: Page) -> None:
    page.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.owned = 1'}))")
    page.run("fetch('https://example.com/').catch(() => { window.refused = true })")
    page.until("window.refused")
    assert page.run("window.owned") is None
    assert any("Content Security Policy" in line for line in page.said)
    page.said.clear()
