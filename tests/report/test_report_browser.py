"""The page in a browser: no errors, every figure to be seen, no sideways scrolling on a phone or a desk.

The page is shown in frames of two widths inside a page that measures them; Chromium prints that page when it is done.
"""

import json
import re
import shutil
import subprocess

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (390, 1280)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--allow-file-access-from-files",
    "--enable-logging=stderr", "--v=0", "--window-size=1400,1000", "--virtual-time-budget=10000", "--dump-dom",
]  # fmt: skip
WRAPPER = """<!DOCTYPE html><html><head><link rel="icon" href="data:,"></head><body><pre id="found"></pre><script>
const found = {};
function measure(frame, width) {
  const page = frame.contentDocument, root = page.documentElement, box = e => e.getBoundingClientRect();
  found[width] = {
    scroll: root.scrollWidth, client: root.clientWidth,
    broken: [...page.images].filter(i => !i.naturalWidth).map(i => i.getAttribute("src")),
    figures: [...page.querySelectorAll("figure")].map(f => [f.id, ...[...f.querySelectorAll(".panels svg")].map(
      s => [box(s).width, box(s).height, box(s).left, box(s).right])]),
    marks: [...page.querySelectorAll("figure .panels svg")].map(s => s.querySelectorAll("path, use, text").length),
    boxes: [...page.querySelectorAll(".scroll")].map(s => [s.querySelector("table").id, box(s).left, box(s).right,
      s.scrollWidth, s.clientWidth, s.querySelector("table").classList.contains("stack")]),
    smallest: Math.min(...[...page.querySelectorAll("p, li, td, th, figcaption")].map(
      e => parseFloat(page.defaultView.getComputedStyle(e).fontSize))),
  };
}
for (const width of %s) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 900; frame.style.border = 0;
  frame.onload = () => {
    measure(frame, width);
    if (Object.keys(found).length == %d) document.getElementById("found").textContent = JSON.stringify(found);
  };
  frame.src = "index.html";
  document.body.appendChild(frame);
}
</script></body></html>"""


def look_at(folder, profile):
    """What the frames measure, and errors: what the browser logged to the console, and images that are not there."""
    wrapper = folder / "wrapper.html"
    wrapper.write_text(WRAPPER % (json.dumps(WIDTHS), len(WIDTHS)))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", wrapper.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    wrapper.unlink()
    told = re.search(r'<pre id="found">(\{.*?\})</pre>', done.stdout, flags=re.DOTALL)
    assert told, f"the browser printed no measurement: {done.stderr[-2000:]}"
    seen = {int(width): page for width, page in json.loads(told[1]).items()}
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return seen, [*console, *(image for page in seen.values() for image in page["broken"])]


needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser found: expected Chromium (apt install chromium)"
)


@needs_browser
@pytest.mark.xdist_group("report page")
def test_the_page_in_a_browser(report, tmp_path):
    seen, errors = look_at(report, tmp_path / "profile")
    assert errors == []
    assert set(seen) == set(WIDTHS)
    for width, page in seen.items():
        assert page["client"] == width
        assert page["scroll"] <= width, f"at {width} px the page scrolls sideways"
        assert len(page["figures"]) == 10
        for name, *panels in page["figures"]:
            assert panels, name
            for panel_width, height, left, right in panels:
                assert min(panel_width / 150, height / 100) >= 1, (name, width)
                assert 0 <= left <= right <= width, name
        assert min(page["marks"]) > 10  # something is drawn
        assert page["smallest"] >= 11
        for name, left, right, inner, outer, stacked in page["boxes"]:
            assert 0 <= left <= right <= width, name
            assert not stacked or inner <= outer, f"{name} scrolls at {width} px"
        if width == 1280:  # on a desk only the widest tables scroll inside their box
            scrolled = [name for name, _, _, inner, outer, _ in page["boxes"] if inner > outer + 1]
            assert set(scrolled) <= {"table-longbench"}, scrolled


@needs_browser
def test_a_page_that_is_too_wide_or_broken_would_be_seen(tmp_path):
    (tmp_path / "page").mkdir()
    wide = '<!DOCTYPE html><link rel="icon" href="data:,"><body><div style="width: 900px">x</div><p>y</p>'
    broken = '<img src="nowhere.png"><script>console.error("bad")</script>'
    (tmp_path / "page" / "index.html").write_text(wide + broken)
    seen, errors = look_at(tmp_path / "page", tmp_path / "profile")
    assert seen[390]["scroll"] > 390
    assert seen[1280]["scroll"] <= 1280
    assert any("bad" in line for line in errors)
    assert "nowhere.png" in errors
