"""A report, opened from disk: it sorts, tells values, hides and shows curves, and fits a phone."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chromium import window
from scripts import ROOT

from adamerge.report import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    runs = [RESULTS / "compare-vit_tiny_patch16_224.csv", RESULTS / "reproduce-vit_tiny_patch16_224"]
    out = tmp_path_factory.mktemp("report") / "report.html"
    return write_report([Path(run) for run in runs], out).as_uri()


def test_a_click_on_a_heading_sorts_numbers_by_value(page: "Page", report):
    page.goto(report)
    heading = page.locator("table").first.locator("th[data-key=top1] button")
    column = "rows => rows.map(row => Number(row.cells[5].dataset.v))"
    for order in (True, False):
        heading.click()
        values = page.locator("table").first.locator("tbody tr").evaluate_all(column)
        assert values == sorted(values, reverse=order) and len(values) == 86
    assert page.locator("th[data-key=top1]").first.get_attribute("aria-sort") == "ascending"


def test_the_pointer_and_the_keyboard_read_the_values_of_a_point(page: "Page", report):
    page.goto(report)
    chart, tip = page.locator("figure.chart > svg").first, page.locator("#tip")
    chart.locator(".series").nth(0).locator("path.mark").nth(2).hover()
    assert tip.is_visible() and "adamerge, cut 30 %" in tip.inner_text() and "speed-up" in tip.inner_text()
    chart.focus()
    page.keyboard.press("ArrowRight")
    first = tip.inner_text()
    page.keyboard.press("ArrowRight")
    assert first.startswith("adamerge, cut 10 %") and tip.inner_text().startswith("adamerge, cut 20 %")
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_six_curves_are_drawn_and_the_legend_shows_others(page: "Page", report):
    page.goto(report)
    figure = page.locator("figure.chart").first
    assert figure.locator(".series:not(.off)").count() == 6
    figure.get_by_role("button", name="random").click()
    assert figure.locator(".series:not(.off)").count() == 7
    figure.get_by_role("button", name="tome", exact=True).click()
    assert figure.locator(".series:not(.off)").count() == 6


def test_the_axes_follow_the_curves_that_are_shown(page: "Page", report):
    page.goto(report)
    figure = page.locator("figure.chart").first
    ticks, marks = figure.locator(".y-axis text"), figure.locator(".series:not(.off) path.mark")
    where = """marks => marks.map(mark => { const box = mark.getBoundingClientRect();
        return [Number(mark.dataset.y), box.y + box.height / 2]; })"""
    span = "texts => texts.map(text => Number(text.textContent))"
    first_ticks, first_marks = ticks.evaluate_all(span), marks.evaluate_all(where)
    names = figure.locator(".legend button[aria-pressed=true]").all_inner_texts()
    figure.get_by_role("button", name="adamerge", exact=True).click()
    inside = ticks.evaluate_all(span)
    assert min(first_ticks) <= -15 < min(inside), "published AdaMerge is far below the others"
    # Every mark is where its value is between the ticks.
    places = figure.locator(".y-axis line").evaluate_all("lines => lines.map(l => l.getBoundingClientRect().y)")
    slope = (places[-1] - places[0]) / (inside[-1] - inside[0])
    for value, at in marks.evaluate_all(where):
        assert at == pytest.approx(places[0] + slope * (value - inside[0]), abs=3)
    figure.get_by_role("button", name="adamerge", exact=True).click()
    assert ticks.evaluate_all(span) == first_ticks
    for before, after in zip(first_marks, marks.evaluate_all(where), strict=True):
        assert after == pytest.approx(before, abs=0.5)
    for name in names:
        figure.get_by_role("button", name=name, exact=True).click()
    assert figure.locator(".series:not(.off)").count() == 0, "an empty chart does no harm"
    figure.get_by_role("button", name="random").click()
    box, frame = marks.last.bounding_box(), figure.locator("svg").first.bounding_box()
    assert box is not None and frame is not None and frame["y"] < box["y"] < frame["y"] + frame["height"]


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_is_never_wider_than_its_window(browser: "Browser", report, width):
    with window(browser, width, 800) as page:
        page.goto(report)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.get_by_text("✗ does not hold").first.is_visible()
        words = "texts => texts.map(text => text.getBoundingClientRect().height)"
        assert min(page.locator("figure.chart .x-axis text").evaluate_all(words)) > 9, "text of a chart can be read"
