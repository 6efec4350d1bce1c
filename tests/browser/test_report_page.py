"""report.html in a real browser: what it shows, what it says, what it must not do."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Browser
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from bench.cli import main

RUNS = Path(__file__).parents[1] / "fixtures" / "runs"
CASES = sorted(path.name for path in RUNS.iterdir() if path.is_dir())
MARKS = """
const figures = [...document.querySelectorAll('figure[data-chart]')].filter((f) => !f.hidden);
return figures.map((figure) => {
  const shown = [...figure.querySelectorAll('svg .role-mark path')].filter((path) => {
    const box = path.getBoundingClientRect();
    return (box.width > 0 || box.height > 0) && path.getAttribute('opacity') !== '0';
  });
  const symbols = shown.filter((path) => path.closest('.mark-symbol')).length;
  const bars = shown.filter((path) => path.closest('.mark-rect')).length;
  return { name: figure.dataset.chart, rows: window.charts[figure.dataset.chart].rows, symbols, bars,
           text: figure.querySelector('svg').textContent };
});
"""
OVERLAPS = """
const out = [];
for (const svg of document.querySelectorAll('figure:not([hidden]) svg.marks')) {
  const seen = (t) => t.textContent.trim() && t.getAttribute('opacity') !== '0';
  const texts = [...svg.querySelectorAll('text')].filter(seen);
  const boxes = texts.map((t) => t.getBoundingClientRect());
  const edge = svg.getBoundingClientRect();
  for (let i = 0; i < boxes.length; i += 1) {
    if (boxes[i].right > edge.right + 1 || boxes[i].left < edge.left - 1) out.push('cut off: ' + texts[i].textContent);
    for (let j = i + 1; j < boxes.length; j += 1) {
      const a = boxes[i]; const b = boxes[j];
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 2 && high > 3) out.push(texts[i].textContent + ' / ' + texts[j].textContent);
    }
  }
}
return out;
"""
TOO_WIDE = """
const right = (thing) => thing.getBoundingClientRect().right;
const wide = (figure) => right(figure.querySelector('svg.marks')) > right(figure) + 1;
return [...document.querySelectorAll('figure:not([hidden])')].filter(wide).map((figure) => figure.dataset.chart);
"""


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = {}
    for name in CASES:
        folder = tmp_path_factory.mktemp(name)
        assert main(["report", str(RUNS / name), "--out", str(folder)]) == 0
        out[name] = folder / "report.html"
    return out


def trials(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


def check_quiet(browser: Browser) -> None:
    assert browser.messages() == []
    asked = browser.requests()
    assert asked, "the page itself must be among the requests, or the log is not working"
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def check_marks(browser: Browser) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = browser.js(MARKS)
    for chart in found:
        drawn = chart["bars"] if chart["name"] == "split" else chart["symbols"]
        assert chart["rows"] > 0
        assert drawn >= chart["rows"], f"{chart['name']}: {drawn} marks for {chart['rows']} rows"
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", CASES)
def test_page_draws_every_plot_quietly(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    browser.open(pages[name], width=width, dark=dark)
    check_quiet(browser)
    charts = check_marks(browser)
    nodes = max((t["point"]["nodes"] for t in trials(RUNS / name) if t["status"] == "ok"), default=0)
    expected = {"throughput", "efficiency", "split"} | ({"bus"} if nodes > 1 else set())
    expected |= {"variants"} if name == "engines" else set()
    assert {chart["name"] for chart in charts} == expected
    emulated = any(t["kind"] == "emulated" for t in trials(RUNS / name))
    for chart in charts:
        assert ("EMULATED P100" in chart["text"]) == emulated
    assert browser.js("return document.documentElement.scrollWidth") <= width
    assert browser.js(OVERLAPS) == []
    assert browser.js(TOO_WIDE) == []


def test_verdict_numbers_equal_the_data(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["network-1g"])
    shown = {
        part.get_attribute("data-key"): (float(part.get_attribute("data-value") or "nan"), part.text)
        for part in browser.driver.find_elements(By.CSS_SELECTOR, "#verdict b")
    }
    rate = {
        (t["point"]["fabric"], t["point"]["nodes"]): t["images_per_second"]["median"]
        for t in trials(RUNS / "network-1g")
        if t["point"]["batch"] == 64
    }
    for key, fabric in (("efficiency", "1g"), ("efficiency:10g", "10g"), ("efficiency:ib", "ib")):
        share = rate[fabric, 10] / (10 * rate[fabric, 1])
        assert shown[key][0] == pytest.approx(share)
        assert shown[key][1] == f"{100 * share:.0f}%"
    assert shown["nodes"] == (10, "ten")
    drawn = browser.js(
        "return charts.efficiency.view.data('rows').filter((r) => r.nodes === 10 && r.batch === 64)"
        ".map((r) => [r.fabric, r.efficiency])"
    )
    assert dict(drawn) == {
        name: pytest.approx(shown[key][0], rel=1e-4)
        for name, key in (("1G", "efficiency"), ("10G", "efficiency:10g"), ("InfiniBand", "efficiency:ib"))
    }
    cards = [card.text for card in browser.driver.find_elements(By.CSS_SELECTOR, ".card .big")]
    assert [card.split()[0] for card in cards] == [
        shown[key][1] for key in ("efficiency", "efficiency:10g", "efficiency:ib")
    ]


def test_verdict_is_on_the_first_screen(browser: Browser, pages: dict[str, Path]) -> None:
    for width, height in ((1280, 800), (390, 844)):
        browser.open(pages["network-1g"], width=width, height=height)
        assert browser.js("return document.getElementById('verdict').getBoundingClientRect().bottom") < height / 2
        assert browser.js("return document.querySelector('.cards').getBoundingClientRect().top") < height


def test_hover_shows_the_numbers(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["straggler"])
    points = browser.driver.find_elements(By.CSS_SELECTOR, "figure[data-chart=throughput] .mark-symbol.role-mark path")
    browser.js("arguments[0].scrollIntoView({block: 'center'})", points[-1])
    ActionChains(browser.driver).move_to_element(points[-1]).perform()
    tooltip = browser.driver.find_element(By.ID, "vg-tooltip-element").text
    last = trials(RUNS / "straggler")[-1]
    assert f"{last['images_per_second']['median']:,.0f}" in tooltip
    assert last["id"] in tooltip and "slow node" in tooltip


def test_choosing_another_family_redraws_plots_and_table(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["engines"])
    before = browser.driver.find_element(By.ID, "points").text
    Select(browser.driver.find_element(By.ID, "family")).select_by_index(1)
    browser.wait()
    after = browser.driver.find_element(By.ID, "points").text
    assert before != after
    ps = [t for t in trials(RUNS / "engines") if t["point"]["engine"] == "ps"]
    for trial in ps:
        assert trial["id"] in after
    assert "parameter server" in check_marks(browser)[0]["text"]
    check_quiet(browser)


def test_table_drawn_by_script_equals_the_one_in_the_file(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["engines"])
    written = browser.driver.find_element(By.CSS_SELECTOR, "#points tbody").text
    chooser = Select(browser.driver.find_element(By.ID, "family"))
    chooser.select_by_index(1)
    browser.wait()
    chooser.select_by_index(0)
    browser.wait()
    assert browser.driver.find_element(By.CSS_SELECTOR, "#points tbody").text == written


def shown_verdict(browser: Browser) -> dict[str, Any]:
    """Everything above the plots that depends on the chosen family, as the browser has it."""
    found: dict[str, Any] = browser.js(
        "return Object.fromEntries(['#verdict', '#why', '.cards', '.findings', '#headline'].map((place) => "
        "[place, document.querySelector(place).outerHTML.replace(/\\s+/g, ' ').replace(/> </g, '><')"
        ".replace(/(>) | (<)/g, '$1$2')]))"
    )
    return found


def test_choosing_a_model_moves_verdict_and_cards(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["two-models"])
    rate = {
        (t["point"]["model"], t["point"]["fabric"], t["point"]["nodes"]): t["images_per_second"]["median"]
        for t in trials(RUNS / "two-models")
    }
    chooser = Select(browser.driver.find_element(By.ID, "family"))
    written = shown_verdict(browser)
    for index, model, name in ((1, "vgg16", "VGG-16"), (0, "resnet50", "ResNet-50")):
        chooser.select_by_index(index)
        browser.wait()
        verdict = browser.driver.find_element(By.ID, "verdict")
        assert verdict.text.startswith(f"With {name} on 1G, two emulated P100 nodes train at ")
        shares = [rate[model, fabric, 2] / (2 * rate[model, fabric, 1]) for fabric in ("1g", "10g")]
        cards = [card.text.split()[0] for card in browser.driver.find_elements(By.CSS_SELECTOR, ".card .big")]
        assert cards == [f"{100 * share:.0f}%" for share in shares]
        figure = browser.driver.find_element(By.CSS_SELECTOR, "#verdict b[data-key=efficiency]")
        assert float(figure.get_attribute("data-value") or "nan") == pytest.approx(shares[0])
        assert name in browser.driver.find_element(By.ID, "headline").text
    # Back at the first family, the script wrote what the file had.
    assert shown_verdict(browser) == written
    check_quiet(browser)


AXIS = """
const seen = (group) => [...group.querySelectorAll('text')].filter((t) => t.getAttribute('opacity') !== '0');
const groups = document.querySelectorAll('figure[data-chart=' + arguments[0] + '] .role-axis-label');
return [...groups].map((group) => seen(group).map((t) => t.textContent));
"""
LINES = """
const found = [...document.querySelectorAll('figure[data-chart=' + arguments[0] + '] svg [stroke-dasharray]')];
const seen = (mark) => mark.getAttribute('opacity') !== '0' && mark.getBoundingClientRect().width > 20;
return [...new Set(found.filter(seen).map((mark) => mark.getAttribute('stroke-dasharray')))];
"""


@pytest.mark.parametrize(("name", "counts"), [("two-models", ["1", "2"]), ("one-count", ["2"]), ("one-node", ["1"])])
def test_node_axis_shows_each_node_count_once(
    browser: Browser, pages: dict[str, Path], name: str, counts: list[str]
) -> None:
    browser.open(pages[name])
    for chart in ("throughput", "efficiency"):
        assert counts in browser.js(AXIS, chart), chart


@pytest.mark.parametrize("name", ["one-count", "two-models", "network-1g"])
def test_lines_that_a_title_promises_are_drawn(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name])
    titles = {chart["name"]: chart["text"] for chart in check_marks(browser)}
    assert "dashed: link rate" in titles["bus"] and len(browser.js(LINES, "bus")) == 2
    assert "dashed: ideal" in titles["throughput"] and len(browser.js(LINES, "throughput")) == 1


def test_hostile_names_run_no_script(browser: Browser, tmp_path: Path) -> None:
    evil = (
        "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>\"'-->"
        "<svg onload=window.hacked=3>"
    )
    folder = tmp_path / "run"
    shutil.copytree(RUNS / "straggler", folder)
    lines = []
    for trial in trials(folder):
        trial["point"]["fabric"] = evil
        trial["point"]["engine"] = evil
        trial["stragglers"] = [evil] if trial["stragglers"] else []
        lines.append(json.dumps(trial))
    failed = dict(trials(folder)[-1], id="feedfeedfeed", status="failed", error=evil, error_node=evil)
    failed["point"]["nodes"] = 9
    (folder / "trials.jsonl").write_text("\n".join([*lines, json.dumps(failed)]) + "\n")
    (folder / "provenance.json").write_text(json.dumps({"nodes": [evil], "created": evil, evil: evil}))
    assert main(["report", str(folder)]) == 0
    browser.open(folder / "report.html")
    points = browser.driver.find_elements(By.CSS_SELECTOR, "figure[data-chart=throughput] .mark-symbol.role-mark path")
    browser.js("arguments[0].scrollIntoView({block: 'center'})", points[-1])
    ActionChains(browser.driver).move_to_element(points[-1]).perform()
    assert "window.hacked" in browser.driver.find_element(By.ID, "vg-tooltip-element").text
    assert browser.js("return window.hacked === undefined")
    assert browser.js("return document.querySelectorAll('img, script, main svg[onload]').length") == 3
    assert "window.hacked=1" in browser.driver.find_element(By.ID, "verdict").text
    check_quiet(browser)


def test_policy_refuses_scripts_that_are_not_the_pages_own(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["straggler"])
    browser.js(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 9'; document.body.append(s)"
    )
    assert browser.js("return window.hacked === undefined")
    assert any("Content Security Policy" in message for message in browser.messages())


@pytest.mark.parametrize(
    "absent", [("link_gbps",), ("breakdown_ms",), ("link_gbps", "breakdown_ms", "bus_bandwidth_gbps")]
)
def test_values_that_were_not_recorded_leave_no_noise(
    browser: Browser, tmp_path: Path, absent: tuple[str, ...]
) -> None:
    """Without one-node points too: then nothing is known of the ideal."""
    folder = tmp_path / "run"
    shutil.copytree(RUNS / "engines", folder)
    kept = [dict(t, **dict.fromkeys(absent)) for t in trials(folder) if t["point"]["nodes"] > 1]
    (folder / "trials.jsonl").write_text("".join(f"{json.dumps(t)}\n" for t in kept))
    assert main(["report", str(folder)]) == 0
    browser.open(folder / "report.html")
    assert {chart["name"] for chart in check_marks(browser)} >= {"throughput", "variants"}
    check_quiet(browser)


def test_report_without_a_measured_point_still_opens(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "trials.jsonl").write_text("")
    assert main(["report", str(tmp_path)]) == 0
    browser.open(tmp_path / "report.html")
    assert "No verdict yet" in browser.driver.find_element(By.ID, "verdict").text
    assert "holds no readable trial" in browser.driver.find_element(By.ID, "missing").text
    check_quiet(browser)


def test_ten_thousand_trials_open(browser: Browser, tmp_path: Path) -> None:
    sys.path.insert(0, str(RUNS.parents[1] / "perf"))
    import report_scale

    report_scale.write_trials(tmp_path / "trials.jsonl", "long curves", 10_000)
    assert main(["report", str(tmp_path)]) == 0
    browser.open(tmp_path / "report.html")
    assert browser.js("return Object.values(charts).every((chart) => chart.rows > 0)")
    check_quiet(browser)
