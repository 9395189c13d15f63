"""Every Python block of the README and the documentation runs as written, or says that it is a fragment.

The pages go on from the names that `getting-started.md` defines (`train_step`, `mesh`, `state`, `batch`, ...). A block
after the comment `<!-- fragment: why -->` is not run. The notebook is made from `getting-started.md`: regenerate it
with `python docs/notebook.py`.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from dataclasses import fields
from pathlib import Path

import jax
import numpy as np
import pytest
from browser import CHROMIUM, chromium

import shardstep
from shardstep._src.planning.programs import VIEWS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"(<!-- fragment: [^>]+ -->\n+)?```python\n(.*?)```", re.S)
PAGES = sorted(p for p in DOCS.rglob("*.md") if "```python" in p.read_text(encoding="utf-8"))
ALONE = {"getting-started.md", "from-scratch.md", "migrate.md"}  # they define all their names


def blocks(path):
    return [code for fragment, code in BLOCK.findall(path.read_text(encoding="utf-8")) if not fragment]


def run(path, space):
    for code in blocks(path):
        exec(compile(code, str(path), "exec"), space)
    return space


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("tutorial"))
        yield run(DOCS / "getting-started.md", {})


def test_the_tutorial_trains(tutorial):
    assert tutorial["losses"][-1] < tutorial["losses"][0]
    moment = tutorial["state"][1][0].mu["in"]
    assert moment.addressable_shards[0].data.shape == (32, 512)
    assert np.isfinite(tutorial["loss"])


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in ALONE], ids=lambda p: p.name)
def test_the_blocks_of_a_page_run(page, tutorial, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = dict(tutorial)
    space["state"] = space["plan"].init(space["create_state"], space["key"])
    run(page, space)


def test_the_idea_from_scratch_works_and_is_short(capsys):
    page = DOCS / "from-scratch.md"
    assert sum(code.count("\n") for code in blocks(page)) <= 150
    space = run(page, {})
    assert space["difference"] < 1e-6 and np.isclose(space["loss"], space["expected"])
    assert space["ours"][1]["in"].addressable_shards[0].data.shape == (64 // jax.device_count(), 128)
    assert "reduce-scatters: 2  all-gathers: 2" in capsys.readouterr().out


def test_the_notebook_is_the_tutorial_and_runs(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("notebook", DOCS / "notebook.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    found = json.loads((DOCS / "getting-started.ipynb").read_text(encoding="utf-8"))
    assert found == maker.notebook((DOCS / "getting-started.md").read_text(encoding="utf-8")), __doc__
    monkeypatch.chdir(tmp_path)
    space = {}
    for cell in found["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "getting-started.ipynb", "exec"), space)
    assert space["losses"][-1] < space["losses"][0]


# -- the README --------------------------------------------------------------------------------------------------------


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    for word in ("ZeRO-1", "FSDP", "CPU", "GPU", "TPU", "optax", "package index", "donate", "Citation"):
        assert word in text
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert target.startswith("https://") or (ROOT / target.split("#")[0]).exists(), target


def test_links_between_pages_lead_somewhere():
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#]+\.(?:md|svg|png|ipynb))(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


# -- the reference -----------------------------------------------------------------------------------------------------


def test_the_reference_names_everything_public():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    for name in shardstep.__all__:
        assert f"::: shardstep.{name}\n" in text, name
    methods = [n for n, f in vars(shardstep.ShardedStep).items() if inspect.isfunction(f) and not n.startswith("_")]
    for name in set(methods) - {"program", "take_apart"}:  # ours
        assert name in text, name
    for name in {*(field.name for field in fields(shardstep.Plan)), *VIEWS} - {"programs", "structure"}:  # ours
        assert f"`{name}`" in text, name


def test_the_reference_names_the_other_modules(monkeypatch):
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = re.search(r"::: shardstep.rules\n +options: \{ members: \[(.*?)\] \}", text)[1].split(", ")
    assert set(shardstep.rules.__all__) == {*listed, "register_rule"}
    for module in (shardstep.nnx, shardstep.keras):
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
                assert f"::: {module.__name__}.{name}\n" in text, name


def test_the_messages_in_troubleshooting_are_those_of_the_code():
    source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # a message goes on in the next line
    quoted = re.findall(r'\*\*"([^"]*)"\*\*', (DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
    assert len(quoted) > 10
    for message in quoted:
        for part in re.split(r"\.\.\.|TFRT_CPU_0|: sent$", message):
            assert part.strip(" ,") in source, message


SITE = ROOT / "site"


@pytest.mark.skipif(not (SITE / "search").exists(), reason="`make docs` has not been run here")
def test_the_site_is_searched_without_a_server():
    pytest.importorskip("playwright")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with chromium() as browser:
        page = browser.new_page()
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((SITE / "index.html").as_uri())
        page.click("input.md-search__input")
        page.keyboard.type("donated")
        page.wait_for_selector(".md-search-result__item")
        assert "troubleshooting.html" in page.inner_html(".md-search-result__list")
        assert all(url.startswith(("file:", "data:")) for url in asked), asked


def test_every_page_is_in_the_navigation():
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        assert str(page.relative_to(DOCS)) in listed, page.name
    for group in ("Start:", "Guides:", "Reference:", "Inside:"):
        assert group in listed
