"""The report in real headless Chromium: it renders, sorts, filters, asks for nothing, and fits the screen."""

import dataclasses
import itertools
import json
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest
from browser import CHROMIUM, chromium, opened

import shardstep
from shardstep import Options
from shardstep._src.planning.plan import Owned
from shardstep._src.planning.programs import Total
from shardstep._src.tools.report.html import page

HOSTILE = "</script><img src=x onerror=alert(1)>&amp;"


def plan_of(leaves, devices=8):
    """A plan with names that would break a careless page, a fallback, and a loop."""

    def step(state, batch):
        def loss(params):
            return sum(jnp.mean((batch @ w) ** 2) for w in params.values())

        value, grads = jax.value_and_grad(loss)(state["params"])
        moment = jax.tree.map(lambda m, g: 0.9 * m + g, state["moment"], grads)
        turned = jnp.fft.fft(state["odd"], axis=0).real
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moment)
        return {"params": params, "moment": moment, "odd": turned}, value

    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    weights = {f"{HOSTILE}{i}" if i == 0 else f"w{i}": square for i in range(leaves)}
    state = {"params": weights, "moment": weights, "odd": square}
    return shardstep.shard(step, options=Options(min_shard_bytes=64)).plan(
        state, jax.ShapeDtypeStruct((16, 64), jnp.float32)
    )


@pytest.fixture(scope="module")
def plan():
    return plan_of(60)


@pytest.fixture(scope="module")
def file(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    plan.to_html(path, title=f"train.py:{HOSTILE}", notes=[f"note {HOSTILE}"])
    return path


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("playwright")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with chromium() as found:
        yield found


def column(page, table, number):
    return page.eval_on_selector_all(
        f"#{table} tbody tr td:nth-child({number})", "cells => cells.map(c => c.innerText)"
    )


class References(HTMLParser):
    """Every address that the elements of a page name."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found += [value for name, value in attributes if name in ("src", "href", "data", "srcset", "action")]


def test_it_is_one_file_that_refers_to_nothing(file):
    text = file.read_text()
    assert References(text).found == [] and HOSTILE not in text
    assert not re.search(r"url\(|@import", re.search(r"<style>(.*?)</style>", text, re.S)[1])


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_it_renders_and_fits(browser, file, width, theme):
    with opened(browser, file, width, theme=theme) as page:
        assert page.troubles == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for plot in ("memory", "wire", "timeline"):
            assert page.locator(f"#{plot} .bars .point").count() >= 2
            box = page.locator(f"#{plot} svg.main-svg").first.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(251, 251, 253)" if theme == "light" else "rgb(18, 21, 26)"
        )
        smallest = page.evaluate(
            "Math.min(...[...document.querySelectorAll('td, #verdict *, .treemap button, .source')]"
            ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
        )
        assert smallest >= 12


def test_the_treemap_is_to_scale_and_leads_to_the_leaves(browser, file, plan):
    with opened(browser, file) as page:
        areas = {
            name: page.eval_on_selector_all(
                f"#map-{name} button",
                "boxes => boxes.map(b => b.offsetWidth * b.offsetHeight).reduce((a, b) => a + b, 0)",
            )
            for name in ("before", "after")
        }
        assert page.locator("#map-before button").count() == 61  # each weight with its moment, and the odd one
        assert areas["after"] / areas["before"] == pytest.approx(plan.state_bytes.ratio, rel=0.1)
        box = page.locator("#map-before button").nth(3)
        name = box.get_attribute("aria-label").split(":")[0]
        box.focus()
        page.keyboard.press("Enter")
        assert page.input_value("#filter") == name and page.locator("#leaves tbody tr").count() >= 1
        assert page.troubles == []


def test_the_verdict_is_there_and_worse_is_red(browser, file, plan, tmp_path):
    worse = dataclasses.replace(plan, wire_bytes=Total(100.0, 151.0), memory=1)
    worse.to_html(tmp_path / "worse.html")
    with opened(browser, tmp_path / "worse.html") as page:
        first = page.locator("#verdict p").first
        assert "worse than the replicated step: too large and sent" in first.inner_text()
        red = page.evaluate("getComputedStyle(document.querySelector('#verdict .worse')).color")
        assert red == "rgb(179, 38, 30)" and page.locator("#verdict .worse").count() == 3
        assert "device: 1 B" in page.locator("#memory").inner_text()
        assert page.troubles == []


def test_the_order_of_the_step_is_told(browser, file, plan):
    kinds = [s.what for s in plan.timeline]
    assert kinds[0] == "forward" and "backward" in kinds and "update" in kinds
    assert kinds.index("backward") < kinds.index("reduce-scatter") < len(kinds) - 1 - kinds[::-1].index("all-gather")
    for segments, total in (
        (plan.timeline, plan.step_seconds.sharded),
        (plan.timeline_before, plan.step_seconds.replicated),
    ):
        assert sum(s.seconds for s in segments) == pytest.approx(total)
    with opened(browser, file) as page:
        lanes = page.locator("#timeline .ytick").all_text_contents()
        bars = page.evaluate(
            "document.getElementById('timeline').data.flatMap(t => t.base.map((b, i) => [b, t.x[i], t.y[i]]))"
        )
    assert set(lanes) == {f"{name}: {lane}" for name in ("replicated", "sharded") for lane in ("compute", "wire")}
    for name in ("replicated", "sharded"):  # one after the other, without a gap
        mine = sorted((start, length) for start, length, lane in bars if lane.startswith(name))
        for (start, length), (following, _) in itertools.pairwise(mine):
            assert start + length == pytest.approx(following, abs=1e-9)


def test_loops_are_drawn_in_rounds_and_a_device_that_is_too_small_as_a_line(browser, tmp_path):
    def step(weights, x):
        def loss(w):
            return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    sharded = shardstep.shard(step, weights="sharded")
    scanned = sharded.plan(jax.ShapeDtypeStruct((6, 256, 256), jnp.float32), jnp.ones((4096, 256)))
    room = round(scanned.state_bytes.replicated / 4)
    dataclasses.replace(scanned, memory=room).to_html(tmp_path / "scanned.html")
    with opened(browser, tmp_path / "scanned.html", 390) as page:
        page.wait_for_function("document.getElementById('timeline').data")
        bars = page.evaluate(
            "document.getElementById('timeline').data.filter(t => t.name === 'all-gather')"
            ".flatMap(t => t.y.filter(lane => lane === 'sharded: wire'))"
        )
        assert len(bars) >= 12, scanned.timeline  # a layer is gathered in each iteration, forward and backward
        line, box = (page.locator(f"#map-before{mark}").bounding_box() for mark in (" .limit", ""))
        assert (line["y"] - box["y"]) / box["height"] == pytest.approx(0.25, abs=0.02)
        assert page.locator("#map-after .limit").count() == 0 and not page.troubles
        assert "→" in page.inner_text("#verdict") and "->" not in page.inner_text("#verdict")


def test_the_timeline_is_zoomed_by_dragging(browser, file):
    with opened(browser, file) as page:

        def shown():
            return page.evaluate("document.getElementById('timeline')._fullLayout.xaxis.range")

        before = shown()
        page.locator("#timeline").scroll_into_view_if_needed()
        box = page.locator("#timeline .nsewdrag").bounding_box()
        page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 20, steps=5)
        page.mouse.up()
        page.wait_for_timeout(300)
        after = shown()
        assert after[1] - after[0] == pytest.approx(0.2 * (before[1] - before[0]), rel=0.1)
        page.mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 20)
        page.wait_for_timeout(300)
        assert shown() == pytest.approx(before) and not page.troubles


def test_owners_of_matrices_are_listed(browser, plan, tmp_path):
    matrices = Owned((64, 64), "float32", 12, (1, 2), 1e9, 2e8, "train.py:12 (step)", "1.0 s instead of 3.0")
    dataclasses.replace(plan, owned=(matrices,)).to_html(tmp_path / "owned.html")
    with opened(browser, tmp_path / "owned.html") as page:
        assert column(page, "owned", 1) == ["12 x float32[64,64]"]
        assert column(page, "owned", 2) == ["1 or 2 per replica"]
        assert page.troubles == []


def test_leaves_sort_and_filter(browser, file, plan):
    with opened(browser, file) as page:
        groups = page.locator("#leaves tbody tr").count()
        saved = [float(text.split()[0]) for text in column(page, "leaves", 7) if "KiB" in text]
        assert groups < 125 and saved == sorted(saved, reverse=True) and saved[0] > 0
        page.check("#each")
        assert page.locator("#leaves tbody tr").count() == 100  # the first page
        page.click("#more")
        assert page.locator("#leaves tbody tr").count() == len(plan.leaves) == 122
        page.fill("#filter", "moment w59")
        assert column(page, "leaves", 1) == ["state['moment']['w59']"]
        page.fill("#filter", "")
        page.select_option("#role", "weight")
        assert set(column(page, "leaves", 3)) == {"weight"} and len(column(page, "leaves", 3)) == 60
        page.select_option("#role", "")
        page.click("#more")
        page.click("#leaves th button:has-text('after')")
        after = sorted((leaf.bytes_after for leaf in plan.leaves), reverse=True)
        assert page.locator("#leaves th[aria-sort=descending]").inner_text() == "after"
        assert column(page, "leaves", 6)[0] == f"{after[0] / 1024:.1f} KiB"
        page.click("#leaves th button:has-text('after')")
        assert column(page, "leaves", 6)[0] == f"{after[-1] / 1024:.1f} KiB" if after[-1] >= 1024 else True
        page.click("#leaves th button:has-text('leaf')")
        names = column(page, "leaves", 1)
        assert names.index("state['moment']['w2']") < names.index("state['moment']['w10']")  # as people count
        assert page.troubles == []


def test_names_are_text_not_html(browser, file):
    with opened(browser, file) as page:
        assert page.locator("h1").inner_text() == f"train.py:{HOSTILE}"
        assert page.locator("#notes").inner_text().splitlines()[-1] == f"note {HOSTILE}"
        page.fill("#filter", "onerror")
        assert page.locator("#leaves tbody tr").count() == 2
        assert page.locator("img").count() == 0


def test_the_update_has_the_users_lines(browser, file):
    with opened(browser, file) as page:
        assert not page.is_visible("#update")  # folded
        page.click("#update-details summary")
        shown = page.locator("#update").inner_text()
    assert 'params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moment)' in shown
    assert "x 60" in shown and "split(0)" in shown and "test_report.py" in shown


def test_the_theme_can_be_changed(browser, file):
    with opened(browser, file) as page:
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
        assert page.troubles == []


def test_what_was_not_sharded_is_shown(browser, file):
    with opened(browser, file) as page:
        assert column(page, "fallbacks", 1) == ["fft"]
        assert "test_report.py" in column(page, "fallbacks", 2)[0]


def test_a_notebook_shows_tables_without_scripts(plan):
    shown = plan._repr_html_()
    assert "<script" not in shown and HOSTILE not in shown and "&lt;/script&gt;" in shown
    assert "8 replicas" in shown and "reduce-scatter" in shown


def test_data_is_json_whatever_the_names(plan):
    text = page(plan, "t")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert len(data["leaves"]) == len(plan.leaves)
    before = sum(data["memory"][0]["parts"].values())
    assert before == plan.state_bytes.replicated
    assert sum(data["memory"][1]["parts"].values()) == plan.state_bytes.sharded
    assert sum(data["wire"][0]["parts"].values()) == pytest.approx(plan.wire_bytes.replicated)
    assert sum(data["wire"][1]["parts"].values()) == pytest.approx(plan.wire_bytes.sharded)


def test_a_step_that_is_left_to_xla_says_so(browser, plan, tmp_path):
    """No empty pictures and tables: its collectives are XLA's."""
    programs = dataclasses.replace(plan.programs, rewritten=False)
    left = dataclasses.replace(plan, engine="annotate", why_engine="because", programs=programs)
    assert left.timeline == left.collectives == left.update == ()
    left.to_html(tmp_path / "left.html")
    with opened(browser, tmp_path / "left.html") as page:
        assert "the step is left to XLA: because" in page.inner_text("#verdict")
        assert "XLA partitions this step" in page.inner_text("#timeline")
        assert page.is_hidden("#collectives") and page.is_hidden("#update-section")
        assert page.is_visible("#left") and not page.troubles
