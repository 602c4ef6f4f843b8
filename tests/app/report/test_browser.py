"""The page in a real browser."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.report.browser import browser, needs_browser, requests, set_dark, set_width
from rlsprune.app.report import write_report
from rlsprune.app.run.folder import RunFolder

pytestmark = needs_browser

NASTY = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
# WCAG 2: relative luminance and contrast of an element's colour on the first background behind it.
CONTRAST = """
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = (rgb) => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * linear(rgb[i] / 255), 0);
const behind = (element) => {
  for (; element; element = element.parentElement) {
    const color = parse(getComputedStyle(element).backgroundColor);
    if (color.length === 3 || color[3] > 0) return color;
  }
  return [255, 255, 255];
};
const shown = (e) => e.getClientRects().length && e.textContent.trim();
return [...document.querySelectorAll(arguments[0])].filter(shown).map((e) => {
  const style = getComputedStyle(e), color = e.namespaceURI.endsWith("svg") ? style.fill : style.color;
  const ink = light(parse(color)), paper = light(behind(e));
  return [(Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05), e.tagName + e.textContent.trim().slice(0, 40)];
});
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def show(driver: Any, tmp_path: Path) -> Callable[..., Any]:
    """Opens the page of some runs on a wide, light screen, or as asked."""

    def opened(*folders: Path, width: int = 1200, dark: bool = False, **options: Any) -> Any:
        page = write_report(folders, tmp_path / "page.html", **options)
        set_width(driver, width)
        set_dark(driver, dark)
        driver.get("about:blank")
        requests(driver), driver.get_log("browser")  # forget what came before
        driver.get(page.as_uri())
        return driver

    return opened


def text(driver: Any, selector: str) -> str:
    return str(driver.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def press(driver: Any, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


def plots(driver: Any) -> list[Any]:
    from selenium.webdriver.common.by import By

    found: list[Any] = driver.find_elements(By.CSS_SELECTOR, ".plot")
    return found


def test_loads_without_an_error_and_without_a_request(runs: dict[str, Path], show: Callable[..., Any]) -> None:
    for folders in ([runs["rls"]], list(runs.values())):
        driver = show(*folders)
        assert driver.get_log("browser") == []
        assert [address for address in requests(driver) if not address.startswith(("file:", "data:"))] == []
        assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
        assert len(plots(driver)) == 4
        drawn = driver.execute_script("return [...document.querySelectorAll('.curve')].map((c) => c.getAttribute('d'))")
        assert drawn
        assert all("NaN" not in path and path.startswith("M") for path in drawn)


def test_curves_answer_the_pointer(runs: dict[str, Path], show: Callable[..., Any]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    driver = show(runs["rls"])
    metrics = RunFolder(runs["rls"]).read_lines("metrics")
    accuracy = plots(driver)[1]
    tip = ".chart:nth-child(2) .tip"
    assert driver.execute_script("return document.querySelector(arguments[0]).hidden", tip)
    for offset, line in (
        (-accuracy.size["width"] // 2 + 55, metrics[0]),
        (accuracy.size["width"] // 2 - 15, metrics[-1]),
    ):
        ActionChains(driver).move_to_element_with_offset(accuracy, offset, 0).perform()
        assert not driver.execute_script("return document.querySelector(arguments[0]).hidden", tip)
        assert text(driver, tip).startswith(f"epoch {line['epoch']}")
        assert f"{line['accuracy']:.2f} %" in text(driver, tip)
    ActionChains(driver).move_to_element(driver.find_element("tag name", "h1")).perform()
    assert driver.execute_script("return document.querySelector(arguments[0]).hidden", tip)


def test_curves_are_walked_with_keys(runs: dict[str, Path], show: Callable[..., Any]) -> None:
    from selenium.webdriver.common.keys import Keys

    driver = show(runs["rls"])
    events = RunFolder(runs["rls"]).read_lines("events")
    driver.execute_script("document.querySelector('.plot').focus()")
    told = lambda: driver.execute_script("return document.activeElement.getAttribute('aria-valuetext')")  # noqa: E731
    press(driver, Keys.HOME)
    assert told().startswith("epoch 1, training ")
    press(driver, Keys.ARROW_LEFT)
    assert told().startswith("epoch 1,"), "there is nothing before the first epoch"
    press(driver, Keys.ARROW_RIGHT)
    assert told().startswith("epoch 2,")
    assert events[0]["epoch"] == 2
    assert "pruned: input 784 → " in told()
    press(driver, Keys.END)
    assert told().startswith("epoch 4,")
    outline = driver.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "where the focus is has to be seen"
    press(driver, Keys.ESCAPE)
    assert driver.execute_script("return document.querySelector('.tip').hidden")


def test_every_control_is_reached_with_tab(runs: dict[str, Path], show: Callable[..., Any]) -> None:
    from selenium.webdriver.common.keys import Keys

    driver = show(*runs.values())
    reached = set()
    for _ in range(60):
        press(driver, Keys.TAB)
        reached.add(driver.execute_script("const e = document.activeElement; return e.className || e.tagName + e.type"))
    assert reached >= {"plot", "SELECTselect-one", "INPUTcheckbox", "INPUTradio", "BUTTONbutton"}


def test_legend_hides_a_curve_and_brings_it_back(runs: dict[str, Path], show: Callable[..., Any]) -> None:
    driver = show(runs["rls"])
    count = lambda: len(driver.find_elements("css selector", ".chart:first-child .curve"))  # noqa: E731
    before = count()
    button = lambda: driver.find_element("css selector", ".chart:first-child .legend button")  # noqa: E731
    button().click()
    assert (count(), button().get_attribute("aria-pressed")) == (before - 1, "false")
    button().click()
    assert (count(), button().get_attribute("aria-pressed")) == (before, "true")


def test_numbers_and_time_axis(runs: dict[str, Path], show: Callable[..., Any]) -> None:
    driver = show(runs["rls"])
    metrics = RunFolder(runs["rls"]).read_lines("metrics")
    driver.find_element("css selector", ".chart:nth-child(2) summary").click()
    time.sleep(0.2)
    cells = driver.execute_script(
        "return [...document.querySelectorAll('.chart:nth-child(2) td')].map((c) => c.textContent)"
    )
    assert cells == [f"{line['accuracy']:.2f} %" for line in metrics]
    driver.find_element("css selector", "input[value=time]").click()
    assert "training time" in text(driver, ".chart:nth-child(2) svg")
    assert driver.get_log("browser") == []


def test_names_stay_text(copy: Path, runs: dict[str, Path], tmp_path: Path, show: Callable[..., Any]) -> None:
    folder = RunFolder(copy)
    metrics = folder.read_lines("metrics")
    for line in metrics:
        line["layers"][0]["name"] = NASTY
    folder.write_lines("metrics", metrics)
    folder.write_json("config", {**folder.read_json("config"), "experiment": NASTY})
    driver = show(copy.rename(tmp_path / "<script>alert(1)"), runs["l1-norm"])
    driver.execute_script("document.querySelector('.plot').focus()")
    assert driver.title.startswith("<script>")
    assert "<script>alert(1)" in text(driver, ".legend")
    assert len(driver.find_elements("css selector", ".legend")) == 1, "one for all charts"
    assert NASTY in text(driver, ".chart:nth-child(4) select")
    assert driver.get_log("browser") == []
    assert len(driver.find_elements("tag name", "script")) == 2


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_fits_a_phone_as_well_as_a_screen(runs: dict[str, Path], show: Callable[..., Any], width: int) -> None:
    for folders in ([runs["rls"]], list(runs.values())):
        driver = show(*folders, width=width)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        assert (
            driver.execute_script(
                "return Math.min(...[...document.querySelectorAll('.plot')].map((p) => p.clientWidth))"
            )
            > 240
        )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everything_is_legible(runs: dict[str, Path], show: Callable[..., Any], dark: bool) -> None:
    driver = show(*runs.values(), dark=dark)
    paper = driver.execute_script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(paper) < 3 * 60) == dark
    measured = driver.execute_script(
        CONTRAST, "h1, h2, h3, p, th, td, .small, dt, dd, summary, button, label, .plot text"
    )
    assert len(measured) > 60
    assert [said for contrast, said in measured if contrast < 4.5] == []


def test_pictures_have_words(runs: dict[str, Path], show: Callable[..., Any]) -> None:
    driver = show(runs["rls"])
    assert all(image.get_attribute("alt") for image in driver.find_elements("tag name", "img"))
    bars = driver.find_elements("css selector", ".network svg")
    assert len(bars) == 4
    assert all("channels" in bar.get_attribute("aria-label") for bar in bars)
    headings = driver.execute_script(
        "return [...document.querySelectorAll('h1,h2,h3')].map((h) => Number(h.tagName[1]))"
    )
    assert headings[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(headings))


def test_page_of_a_run_in_progress_reloads_itself(
    unfinished: Path, runs: dict[str, Path], show: Callable[..., Any]
) -> None:
    driver = show(unfinished, reload_seconds=1)
    assert "epoch 2 of 4" in text(driver, "header")
    page = Path(driver.current_url.removeprefix("file://"))
    write_report([runs["rls"]], page)
    for _ in range(100):
        if "In progress" not in text(driver, "header"):
            break
        time.sleep(0.1)
    assert "In progress" not in text(driver, "header")
    assert driver.execute_script("return document.body.dataset.reload") is None


def test_every_layer_has_a_strip_that_shows_what_is_left(fitted: Path, show: Callable[..., Any]) -> None:
    driver = show(fitted)
    last = RunFolder(fitted).read_lines("metrics")[-1]["layers"]
    ends = driver.execute_script("return [...document.querySelectorAll('.strip text.end')].map((e) => e.textContent)")
    assert [float(text.removesuffix(" %")) for text in ends] == [
        pytest.approx(layer["nodes_percent"], rel=5e-3) for layer in last
    ]
    strip = driver.find_element("css selector", ".strip")
    driver.execute_script("arguments[0].focus()", strip)
    press(driver, "\ue011")  # Home
    assert strip.get_attribute("aria-valuetext").startswith("epoch 1, input 100.00 %")


def test_axis_of_the_score_shows_the_end_and_the_start_when_asked(copy: Path, show: Callable[..., Any]) -> None:
    folder = RunFolder(copy)
    lines = folder.read_lines("metrics")
    for line, accuracy in zip(lines, (10.0, 97.0, 97.4, 97.6), strict=True):
        line["accuracy"] = accuracy
    folder.write_lines("metrics", lines)
    driver = show(copy)
    script = (
        "const chart = document.querySelectorAll('.chart')[1];"
        "return [...chart.querySelectorAll('text[text-anchor=end]')].map((e) => Number(e.textContent)).filter((v) => v)"
    )
    assert min(driver.execute_script(script)) > 90
    assert "97.60 %" in text(driver, ".chart:nth-child(2) text.end")
    driver.find_element("css selector", ".chart:nth-child(2) input").click()
    assert min(driver.execute_script(script)) <= 20


def test_names_fit_on_a_phone(fitted: Path, show: Callable[..., Any]) -> None:
    driver = show(fitted, width=360)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 360
    outside = driver.execute_script(
        "return [...document.querySelectorAll('.layer .name, .names li, .strip text, .layers th')].filter((e) => {"
        "const box = e.getBoundingClientRect(); return box.width && (box.left < 0 || box.right > 360); })"
        ".map((e) => e.textContent)"
    )
    assert outside == []
