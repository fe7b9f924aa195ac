"""The site's style in a real browser: on a phone nothing on the front page exceeds the right edge."""

from pathlib import Path

import pytest

STYLE = Path(__file__).parents[2] / "docs" / "_static" / "site.css"
PAGE = """<!DOCTYPE html><meta name="viewport" content="width=device-width"><style>{style}</style>
<main class="bd-article"><div class="hero"><img src="data:image/svg+xml,
<svg xmlns='http://www.w3.org/2000/svg' width='860' height='300'/>"></div><div class="highlight"><pre><code>{code}
</code></pre></div></main>"""


@pytest.mark.parametrize("width", [360, 390])
def test_drawing_and_code_are_not_cut_on_a_phone(browser, tmp_path, width):
    file = tmp_path / "page.html"
    file.write_text(PAGE.format(style=STYLE.read_text(), code="    total = comm.all_reduce(x)  # " + "a" * 100))
    browser.show(file, width)
    for name in (".hero img", ".hero", "pre"):
        right = browser.run(f"Math.ceil(document.querySelector('{name}').getBoundingClientRect().right)")
        assert right <= width, name
        hidden = browser.run(f"(e => e.scrollWidth - e.clientWidth)(document.querySelector('{name}'))")
        assert hidden <= 0, name
