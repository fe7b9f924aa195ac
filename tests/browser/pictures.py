"""The pictures of results in bench/pictures: python tests/browser/pictures.py RUN.json [FOLDER, bench/pictures]."""

import sys
import tempfile
from pathlib import Path

from chromium import Chromium
from gpucoll.bench import plot, records, report

LARGEST = 150_000  # bytes of one picture
VIEWS = {"page": (1200, 830, False), "page-dark": (1200, 830, True), "page-phone": (390, 1000, False)}


def main(run, folder=None):
    """Write all pictures; exit with the names of pictures too large to be kept."""
    folder = Path(folder or Path(__file__).parents[2] / "bench" / "pictures")
    with tempfile.TemporaryDirectory() as work:
        page = Path(work) / "page.html"
        page.write_text(report.page_text([run]), encoding="utf-8")
        browser = Chromium(f"{work}/profile")
        for name, (width, height, dark) in VIEWS.items():
            browser.show(page, width, height, dark=dark)
            browser.wait("figure + figure .main-svg")
            browser.picture(folder / f"{name}.png")
        browser.close()
    plot.draw(records.read(run)[0], str(folder / "plot.png"))
    large = [path.name for path in folder.glob("*.png") if path.stat().st_size > LARGEST]
    sys.exit(f"too large to be kept: {', '.join(large)}" if large else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
