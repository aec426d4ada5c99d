"""report.html in a browser: the script's drawings, the selections of links, and that every name remains
text."""

import base64
import functools
import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nanlocator import _C

WRITE_PAGES = Path(_C.__file__).parents[2] / "tests" / "write_sample_pages"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: the package chromium)"),
    pytest.mark.skipif(not WRITE_PAGES.exists(), reason=f"{WRITE_PAGES.name} is built with the C++ tests"),
]


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    parent: "Element | None" = None
    children: list["Element | str"] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    @property
    def classes(self) -> set[str]:
        return set(self.attributes.get("class", "").split())

    def all(self, tag: str, *classes: str, **attributes: str) -> list["Element"]:
        found = []
        for child in self.children:
            if isinstance(child, str):
                continue
            matches = (tag in (child.tag, "*")) and child.classes.issuperset(classes)
            if matches and all(child.attributes.get(name) == value for name, value in attributes.items()):
                found.append(child)
            found += child.all(tag, *classes, **attributes)
        return found

    def by_id(self, name: str) -> "Element":
        (found,) = self.all("*", id=name)
        return found


class TreeBuilder(HTMLParser):
    VOID = frozenset({"meta", "link", "input", "br", "img", "wbr", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.root = self.at = Element("", {})

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs}, self.at)
        self.at.children.append(element)
        if tag not in self.VOID:
            self.at = element

    def handle_endtag(self, tag: str) -> None:
        element: Element | None = self.at
        while element and element.tag != tag:
            element = element.parent
        if element and element.parent:
            self.at = element.parent

    def handle_data(self, data: str) -> None:
        self.at.children.append(data)


def parse(html: str) -> Element:
    builder = TreeBuilder()
    builder.feed(html)
    return builder.root


@dataclass
class Opened:
    page: Element
    console: list[str]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    subprocess.run([WRITE_PAGES, folder], check=True, timeout=120)
    html = (folder / "located.html").read_text(encoding="utf-8")
    changed = html.replace("'use strict';", "'use strict' ;")  # not the text of the policy's hash
    assert changed != html
    (folder / "changed_script.html").write_text(changed, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def open_page(pages: Path, tmp_path_factory: pytest.TempPathFactory):
    profile = tmp_path_factory.mktemp("profile")

    @functools.cache
    def load(name: str, address: str = "") -> Opened:
        assert BROWSER
        command = [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
            "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom",
        ]  # fmt: skip
        command.append(f"{(pages / name).with_suffix('.html').as_uri()}{address}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return Opened(parse(done.stdout), [line for line in done.stderr.splitlines() if "CONSOLE" in line])

    return load


def cells(page: Element) -> dict[int, set[str]]:
    return {int(cell.attributes["id"].removeprefix("rank-")): cell.classes for cell in page.all("td", "rank")}


def rows(page: Element, section: str) -> list[Element]:
    (body,) = page.by_id(f"{section}-body").all("tbody")
    return body.all("tr")


@pytest.mark.parametrize("name", ["located", "clean", "partial", "several", "hostile", "large", "huge"])
def test_every_page_is_drawn_without_a_word_on_the_console(open_page, name: str) -> None:
    opened = open_page(name)
    (html,) = opened.page.all("html")
    assert html.attributes.get("data-drawn") == "yes"
    assert opened.console == []


def test_the_grid_tells_by_class_letter_and_label_what_each_rank_is(open_page) -> None:
    page = open_page("located").page
    states = {
        rank: next(iter(classes & {"born", "received", "reduced", "clean"}))
        for rank, classes in cells(page).items()
    }
    replica = dict.fromkeys((0, 1, 4), "received")
    assert states == {5: "born"} | replica | dict.fromkeys((2, 3, 6, 7), "reduced")
    born = page.by_id("rank-5")
    assert born.text == "B"
    assert born.attributes["aria-label"] == "rank 5, tp1 dp0 pp1: born"


def test_partial_evidence_shows_as_candidates_silence_and_unknown(open_page) -> None:
    found = cells(open_page("partial").page)
    assert "candidate" in found[4] and "candidate" in found[5]
    assert "silent" in found[7]
    assert "unknown" in found[2]


@pytest.mark.parametrize(("name", "ranks"), [("large", 1024), ("huge", 16384)])
def test_the_grid_has_a_cell_for_every_rank(open_page, name: str, ranks: int) -> None:
    assert sorted(cells(open_page(name).page)) == list(range(ranks))


def test_a_link_selects_a_rank(open_page) -> None:
    page = open_page("located", "#rank=1").page
    assert [
        cell.attributes["id"] for cell in page.all("td", "rank") if cell.attributes["aria-selected"] == "true"
    ] == ["rank-1"]
    (heading,) = page.by_id("rank-details").all("h3")
    assert heading.text.endswith("rank 1: received")
    assert "a17" in page.by_id("rank-details").text


def test_one_cell_of_the_grid_can_be_reached_with_tab(open_page) -> None:
    page = open_page("located").page
    assert [cell.attributes["id"] for cell in page.all("td", "rank", tabindex="0")] == ["rank-5"]


def test_the_search_finds_sightings_by_every_word(open_page) -> None:
    everything = open_page("located").page.by_id("ledgers-body").text
    assert "139 bad tensors on 8 ranks" in everything
    # linear_fc1 of layers 2 (ranks 4 to 7), 1 and 0 (ranks 0 to 3), after the reduction
    found = rows(open_page("located", "#search=grad_reduced%20fc1").page, "ledgers")
    assert len(found) == 12
    assert all("linear_fc1.weight" in row.text and "grad_reduced" in row.text for row in found)
    assert rows(open_page("located", "#search=no_such_thing").page, "ledgers") == []


def test_a_link_filters_the_parameters(open_page) -> None:
    found = rows(open_page("located", "#parameter=layers.2.mlp").page, "parameters")
    assert [row.all("th")[0].text for row in found] == [
        "decoder.layers.2.mlp.linear_fc2.weight",
        "decoder.layers.2.mlp.linear_fc1.weight",
    ]
    assert all("bad on 2 of 4" in row.text and "bad on 4 of 4" in row.text for row in found)


def test_the_timeline_marks_the_origin_and_the_ways_of_the_fault(open_page) -> None:
    body = open_page("located").page.by_id("timeline-body")
    (picture,) = body.all("svg", role="img")
    assert [mark.text for mark in picture.all("polygon", "origin-mark")] == ["origin 1: operator_undefined"]
    assert len(picture.all("path", "arrow", "first")) == 3


def test_the_heat_map_draws_nan_and_inf_apart(open_page) -> None:
    (picture,) = open_page("located").page.by_id("tensor-body").all("svg")
    assert len(picture.all("rect", "nan")) == 3
    assert len(picture.all("rect", "inf")) == 2
    assert [text.text for text in picture.all("text", "on-inf")] == ["+", "\N{MINUS SIGN}"]


def test_histories_have_a_gap_where_a_step_was_not_seen(open_page) -> None:
    figure = open_page("located").page.by_id("histories-body").all("figure")[0]
    (norm,) = figure.all("path", "norm")
    assert norm.attributes["d"].count("M") == 2


def test_names_stay_text(open_page) -> None:
    opened = open_page("hostile")
    assert opened.page.all("title")[0].text == "nanlocator: step 1284"
    assert opened.page.all("img") == []
    assert len(opened.page.all("script")) == 2
    assert "<img src=x" in opened.page.by_id("verdict").text


def test_a_changed_script_does_not_run_and_the_verdict_can_be_read_without_it(open_page) -> None:
    opened = open_page("changed_script")
    assert any("Content Security Policy" in line for line in opened.console)
    page = opened.page
    headline = "NaN and Inf born in backward of aten::sqrt on rank 5"
    assert headline in page.by_id("verdict").text
    assert "derivative of aten::sqrt" in page.by_id("verdict").text
    assert "received" in page.by_id("rank-summary").text
    assert page.all("td", "rank") == []


def test_the_policy_has_the_hashes_of_this_style_and_script(pages: Path) -> None:
    html = (pages / "located.html").read_bytes()
    for tag in (b"style", b"script"):
        (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        assert f"{tag.decode()}-src 'sha256-{digest}'" in html.decode()


@pytest.mark.parametrize("name", ["located", "partial", "several"])
def test_a_screen_reader_finds_names_headers_and_headings(open_page, name: str) -> None:
    page = open_page(name).page
    ids = [element.attributes["id"] for element in page.all("*") if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    for section in page.all("section"):
        assert page.by_id(section.attributes["aria-labelledby"]).text
    for control in [*page.all("input"), *page.all("select")]:
        parent = control.parent
        assert parent and parent.tag == "label" and parent.text.strip()
    for button in page.all("button"):
        assert button.text.strip()
    for header in page.all("th"):
        assert header.attributes["scope"] in {"col", "row", "colgroup"}
    for picture in page.all("svg"):
        assert picture.attributes.get("aria-hidden") == "true" or picture.attributes["aria-label"]
