"""The browser in which pages are looked at."""

import pytest

from browser.chromium import PROGRAM, Chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A Chromium of its own for each file; the test is skipped where there is none."""
    if PROGRAM is None:
        pytest.skip("no Chromium was found: apt-get install chromium")
    found = Chromium(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()
