"""The built site in a browser: nothing overflows, and the search finds what readers look for.

`GBFUNC_SITE` names the folder of a built site; `.ci/run` builds one.
"""

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SITE = Path(os.environ.get("GBFUNC_SITE", ""))
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif("GBFUNC_SITE" not in os.environ, reason="GBFUNC_SITE names no built site"),
]
OVERFLOWS = """() => {
  const wide = [...document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap")]
    .filter((element) => element.scrollWidth > element.clientWidth + 1)
    .map((element) => element.textContent.trim().slice(0, 60));
  return document.documentElement.scrollWidth > window.innerWidth + 1 ? [...wide, "the page"] : wide;
}"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize("width", [1280, 390])
def test_code_and_tables_fit(browser: Any, address: str, width: int) -> None:
    pages = [SITE / "index.html", *sorted(SITE.glob("guides/*.html")), *sorted(SITE.glob("results/*.html"))]
    assert len(pages) > 25
    page = browser.new_page(viewport={"width": width, "height": 900})
    wide = {}
    for path in pages:
        page.goto(address + path.relative_to(SITE).as_posix())
        wide[path.name] = page.evaluate(OVERFLOWS)
    page.close()
    assert {name: found for name, found in wide.items() if found} == {}


@pytest.mark.parametrize(
    ("words", "expected"),
    [("install", "install"), ("learning rate", "shrink"), ("quantize", "files"), ("GPU", "speed"), ("Colab", "install")]
    + [("own loop", "loop"), ("--genome-bytes", "shrink")],
)
def test_search_finds_the_page_first(browser: Any, address: str, words: str, expected: str) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}index.html")
    page.locator(".md-search__input").click()
    page.locator(".md-search__input").press_sequentially(words)
    page.locator(".md-search-result__item a").first.wait_for(timeout=30_000)
    page.wait_for_timeout(1_000)
    link = page.locator(".md-search-result__item a").first.get_attribute("href")
    page.close()
    assert f"guides/{expected}.html" in str(link)
