"""Everything that only a GPU can show; skipped without a GPU, with the reason."""

import pytest

from gpu import cases

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def gpu():
    """Skip the tests if CuPy, a driver or a GPU is missing."""
    absent = cases.missing("ml_dtypes")
    if absent:
        pytest.skip(absent)


@pytest.mark.parametrize("name", cases.CASES)
def test_gpu(name):
    try:
        cases.CASES[name]()
    except cases.Skipped as error:
        pytest.skip(str(error))
