"""The HTML reports in a real browser without a network: what a reader sees, and that nothing is asked for elsewhere."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from tests.compare.test_compare import plan, start_of
from tests.compare.test_serving_results import result_of
from uccl_ep_serving.compare.report import write_reports
from uccl_ep_serving.compare.results import assemble
from uccl_ep_serving.compare.serving.report import write_reports as write_serving

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
#: Of bars, in plot.py.
OURS = (0x1F, 0x6F, 0xEB)

pytestmark = pytest.mark.skipif(not BROWSER, reason="no chromium; on Debian and Ubuntu: apt-get install chromium")


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open ``page`` in a headless browser that resolves no name."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr",
        f"--user-data-dir={page.parent / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars",
        "--window-size=1200,1800", *options, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def check(page: Path, *words: str) -> None:
    """The browser draws ``page`` as it was meant, and complains of nothing."""
    shown = browse(page, "--dump-dom")
    for word in words:
        assert word in shown.stdout
    complaints = [line for line in shown.stderr.splitlines() if "CONSOLE" in line or "Refused to" in line]
    assert not complaints, "what the page's own policy forbids is asked for"
    picture = page.parent / "screen.png"
    browse(page, f"--screenshot={picture}")
    with Image.open(picture) as image:
        colours = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 24) or []}
    assert colours.get(OURS, 0) > 1000, "the bars of the picture are not on the screen"


def test_a_comparison_of_backends(tmp_path: Path) -> None:
    one = plan("uccl_ep", "gloo")
    starts = [start_of(one, number, {"gloo": 2.0}) for number in (1, 2, 3)]
    page, *_ = write_reports(assemble(one, starts, tmp_path), tmp_path)
    check(page, "uccl_ep is faster than gloo", "What moved, and how", "Verdicts")


def test_a_comparison_of_servers(tmp_path: Path) -> None:
    page, *_ = write_serving(result_of({"uccl_ep": 110.0, "none": 100.0}), tmp_path)
    check(page, "output tokens/s: uccl_ep is faster than none", "Commands", "serve --x none")


def test_a_page_that_asks_for_more_is_noticed(tmp_path: Path) -> None:
    page, *_ = write_serving(result_of({"uccl_ep": 110.0, "none": 100.0}), tmp_path)
    page.write_text(page.read_text().replace("</body>", '<script src="https://cdn.example/x.js"></script></body>'))
    with pytest.raises(AssertionError, match="policy forbids"):
        check(page)
