"""The page of `write_report` in a real browser: laid out, in colour, light and dark, wide and narrow."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from bunkbed.train.report import write_report
from report_setup import make_run

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here (Debian: apt-get install chromium)")

WIDE, NARROW = 1100, 360
# Measures the page in frames of both widths: a page with scripts around one that allows none.
MEASURE = """
<!DOCTYPE html><body><iframe width=WIDE height=3000></iframe><iframe width=NARROW height=3000></iframe>
<pre id=found></pre><script>
const frames = [...document.querySelectorAll("iframe")], found = [];
frames.forEach((frame, index) => {
  frame.onload = () => {
    const page = frame.contentDocument, root = page.documentElement;
    const visible = (element) => { const box = element.getBoundingClientRect(); return [box.width, box.height]; };
    const line = page.querySelector('section#learning svg path[style*="--a"]');
    found[index] = {
      width: root.clientWidth, needed: root.scrollWidth, height: root.scrollHeight,
      charts: [...page.querySelectorAll("svg")].map(visible),
      beyond: [...page.querySelectorAll("svg text")].filter((text) => {
        const box = text.getBoundingClientRect(), card = text.closest("figure").getBoundingClientRect();
        return box.left < card.left || box.right > card.right || box.bottom > card.bottom || !box.width;
      }).map((text) => text.textContent),
      stroke: frame.contentWindow.getComputedStyle(line).stroke,
      track: visible(page.querySelector(".track i")),
    };
    if (found.filter(Boolean).length === 2) document.getElementById("found").textContent = JSON.stringify(found);
  };
  frame.srcdoc = PAGE;
});
</script></body>
"""


def browse(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--disable-extensions", "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}", *arguments,
        ],
        capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return write_report(make_run(folder / "first"), folder / "page.html")


def test_it_is_laid_out_wide_and_narrow(page: Path) -> None:
    around = page.with_name("around.html")
    # Within a script the text must not end it; JSON's own escapes do for the rest.
    script = MEASURE.replace("WIDE", str(WIDE)).replace("NARROW", str(NARROW))
    around.write_text(script.replace("PAGE", json.dumps(page.read_text()).replace("</", "<\\/")))
    done = browse(page.parent, "--dump-dom", around.as_uri())
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text is not None and text[1], done.stdout[-2000:]
    for found, width in zip(json.loads(html.unescape(text[1])), (WIDE, NARROW), strict=True):
        check_layout(found, width)
    refused = [line for line in done.stderr.splitlines() if "Refused" in line or "violates" in line]
    assert not refused  # the page does nothing that its own policy forbids


def check_layout(found: dict[str, Any], width: int) -> None:
    assert found["width"] >= width - 20
    assert found["needed"] <= found["width"], f"{width} wide, it scrolls sideways: {found['needed']}"
    assert len(found["charts"]) == 6
    least = 260 if width == NARROW else 400
    assert all(chart[0] > least and chart[1] > least / 3 for chart in found["charts"]), found["charts"]
    assert found["beyond"] == []
    assert found["stroke"] == "rgb(47, 111, 181)"  # --a of the light scheme
    assert found["track"][0] > 1 and found["track"][1] > 5


@pytest.mark.parametrize(
    ("scheme", "paper", "line"),
    [("light", (0xFB, 0xFB, 0xFA), (0x2F, 0x8F, 0x63)), ("dark", (0x15, 0x18, 0x1B), (0x63, 0xC2, 0x94))],
)
def test_it_is_drawn_light_and_dark(scheme: str, paper: tuple[int, ...], line: tuple[int, ...], page: Path) -> None:
    import numpy as np
    from matplotlib.image import imread

    picture = page.with_name(f"{scheme}.png")
    flags = ["--force-dark-mode"] if scheme == "dark" else []
    browse(page.parent, *flags, f"--screenshot={picture}", f"--window-size={WIDE},1600", page.as_uri())
    pixels = np.rint(imread(picture)[..., :3] * 255).astype(int)
    assert pixels.shape[:2] == (1600, WIDE)
    assert tuple(pixels[4, 4]) == paper
    assert (pixels == line).all(axis=-1).sum() > 100  # the line of rows found in RAM
