"""The documentation site is built without a warning, and a browser finds its way around it."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import chromium
import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".venv-docs"
OLDER = "0.1.0"
"""A release that is published already."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (ENVIRONMENT / "packages.stamp").exists(), reason="no environment for the documentation: make docs makes it"
    ),
]
in_a_browser = pytest.mark.skipif(chromium.find() is None, reason="no Chromium here: make browser installs it")


class Links(HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(values["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in values:
            self.loaded.append(values["src"])


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all releases, to which this checkout's has been added; nothing was warned of."""
    folder = tmp_path_factory.mktemp("site")
    (folder / OLDER).mkdir()
    (folder / OLDER / "index.html").write_text("<!doctype html><title>old</title><p>an older release</p>")
    build = [ENVIRONMENT / "bin" / "python", ROOT / "docs" / "site" / "build.py", folder]
    done = subprocess.run(build, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def version(published: Path) -> str:
    (name,) = {path.parent.name for path in published.glob("*/index.html")} - {OLDER}
    return name


@pytest.fixture(scope="module")
def pages(published: Path, version: str) -> dict[str, Links]:
    """Every page of the release by its path from the root of the host, such as ``/0.2.0/how-to/train/``."""
    found = {}
    for file in sorted((published / version).rglob("*.html")):
        if file.name != "404.html":  # served at any address, with absolute links
            page = found[f"/{file.relative_to(published).as_posix().removesuffix('index.html')}"] = Links()
            page.feed(file.read_text(encoding="utf-8"))
    return found


@pytest.fixture
def address(published: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(published)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# -- files ---------------------------------------------------------------------------------------------------


def test_every_page_is_there(pages: dict[str, Links], version: str) -> None:
    """Of docs/, of the plugins, and of the API of core and of every plugin."""
    kinds = ("tutorials", "how-to", "reference", "explanation")
    expected = {f"{kind}/{path.stem}" for kind in kinds for path in (ROOT / "docs" / kind).glob("*.*")}
    expected |= {f"plugins/{path.parent.name}" for path in ROOT.glob("plugins/*/README.md")}
    expected |= {f"api/{path.name}" for path in ROOT.glob("plugins/*/src/torchhal_*")}
    expected |= {"api/torchhal", "api/torchhal.trainer.callbacks", "api/torchhal.strategies", "all-pages"}
    assert {f"/{version}/{path}/" for path in expected} - set(pages) == set()


def test_no_link_is_dead(pages: dict[str, Links], published: Path) -> None:
    dead = defaultdict(list)
    for path, page in pages.items():
        for link in page.links:
            target = urlsplit(urljoin(f"http://site{path}", link))
            if target.netloc != "site" or target.scheme != "http":
                continue
            if target.path in pages:
                is_there = not target.fragment or unquote(target.fragment) in pages[target.path].anchors
            else:
                is_there = (published / target.path[1:]).is_file()
            if not is_there:
                dead[path].append(link)
    assert dead == {}


def test_nothing_is_loaded_from_elsewhere(pages: dict[str, Links], published: Path) -> None:
    """So the site works without a network."""
    for path, page in pages.items():
        for loaded in page.loaded:
            target = urlsplit(urljoin(f"http://site{path}", loaded))
            assert target.netloc == "site", f"{path} loads {loaded}"
            assert (published / target.path[1:]).is_file(), f"{path} loads {loaded}"


def test_docstrings_are_rendered(published: Path, version: str) -> None:
    """No markup of Sphinx is left, and members that a class has of a private base are there."""
    api = {file.parent.name: file.read_text() for file in (published / version / "api").glob("*/index.html")}
    for name, text in api.items():
        for rest in (":class:", ":meth:", ":func:", ".. versionadded", "__all__</"):
            assert rest not in text, f"{name}: {rest}"
    assert 'id="torchhal.Trainer.fit"' in api["torchhal"]
    assert 'id="torchhal.Trainer.callback_metrics"' in api["torchhal"]  # of a private base


def test_markdown_is_rendered(published: Path, version: str) -> None:
    """No list is taken for text, and no reference or directive for words: Markdown's renderers differ in these."""
    left = defaultdict(list)
    for file in (published / version).rglob("index.html"):
        _, _, article = file.read_text(encoding="utf-8").partition("<article")
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", article.partition("</article>")[0], flags=re.DOTALL)
        for paragraph in re.findall(r"<(?:p|li|td)>(.*?)</(?:p|li|td)>", text, flags=re.DOTALL):
            if re.search(r"\n[-*] |^\| |``|\]\(|:(?:class|meth|func|attr|data):|\.\. \w+::", paragraph):
                left[file.parent.name].append(paragraph)
    assert left == {}


def test_versions_are_listed(published: Path, version: str) -> None:
    """The newest first; the address without a version leads to the newest that is no pre-release."""
    assert [entry["version"] for entry in json.loads((published / "versions.json").read_text())] == [version, OLDER]
    release = OLDER if Version(version).is_prerelease else version
    assert f"url={release}/" in (published / "index.html").read_text()


# -- in a browser --------------------------------------------------------------------------------------------


@in_a_browser
def test_pages_open_without_an_error(pages: dict[str, Links], address: str) -> None:
    with chromium.page() as page:
        for path in pages:
            page.open(address + path)
            assert page.evaluate("document.querySelector('h1').textContent.trim()"), path
            assert page.errors == [], path
        assert [url for url in page.requests if not url.startswith((address, "data:", "blob:", "about:"))] == []


@in_a_browser
@pytest.mark.parametrize(
    "script", ["nowhere()", "console.error('nowhere')", "fetch('/nowhere')", "Promise.reject(Error('nowhere'))"]
)
def test_an_error_of_a_page_is_seen(script: str, published: Path, address: str) -> None:
    """What the test above relies on."""
    (published / "broken.html").write_text(f"<!doctype html><h1>broken</h1><script>{script}</script>")
    with chromium.page() as page:
        page.open(f"{address}/broken.html")
        page.wait_for("document.readyState == 'complete'")
        page.evaluate("new Promise(resolve => setTimeout(resolve, 200))")
        assert any("nowhere" in error for error in page.errors)


@in_a_browser
def test_search_finds_a_strategy(address: str, version: str) -> None:
    """The dialog lies in a shadow tree, into which typing goes as a person's does."""
    with chromium.page() as page:
        page.open(f"{address}/{version}/")
        page.click(".md-search__button")
        page.wait_for("document.activeElement.shadowRoot?.querySelector('input')")
        page.type("zero3")
        found = page.wait_for(
            """(() => {
              const links = [...document.activeElement.shadowRoot.querySelectorAll("[role=listbox] a")];
              const found = links.map(link => [link.href, link.textContent]);
              return found.some(([_, text]) => text.includes("zero3")) && found;
            })()"""
        )
        assert found[0][0].startswith(f"{address}/{version}/how-to/choose-a-strategy/"), found
        page.open(found[0][0])
        assert "zero3" in page.evaluate("document.querySelector('article').textContent")


@in_a_browser
def test_code_is_copied(address: str, version: str) -> None:
    with chromium.page() as page:
        page.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        page.open(f"{address}/{version}/how-to/train/")
        page.wait_for("document.querySelector('article pre .md-code__button[data-clipboard-target]')")
        page.click("article pre .md-code__button[data-clipboard-target]")
        copied = page.wait_for("navigator.clipboard.readText()")
        assert copied.startswith("import torch\nimport torchhal\n")
        assert copied.strip() == page.evaluate("document.querySelector('article pre > code').textContent").strip()
        blocks = "[...document.querySelectorAll('article .highlight pre')]"
        assert page.evaluate(f"{blocks}.length > 0 && {blocks}.every(block => block.querySelector('button'))")


@in_a_browser
def test_another_version_can_be_chosen(address: str, version: str) -> None:
    with chromium.page() as page:
        page.open(f"{address}/{version}/how-to/train/")
        page.wait_for("document.querySelector('.md-version__link')")
        links = page.evaluate(
            "[...document.querySelectorAll('.md-version__link')].map(one => [one.textContent, one.href])"
        )
        assert links == [[name, f"{address}/{name}/"] for name in (version, OLDER)]
        assert page.evaluate("document.querySelector('.md-version__current').textContent").strip() == version
