"""The browser of the tests of pages."""

import pytest

from browser.chromium import PROGRAM, Chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Yield a Chromium of its own for each file; skip the test without Chromium."""
    if PROGRAM is None:
        pytest.skip("no Chromium was found: apt-get install chromium")
    found = Chromium(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()
