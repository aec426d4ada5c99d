"""The Python versions that may import an extension, decided from version strings alone."""

import platform

import pytest

from nanlocator import _build_info
from nanlocator.engine.python_versions import misfit


@pytest.mark.parametrize("installed", ["3.11.7", "3.11.0rc2", "3.11.2+"])
def test_a_build_fits_every_python_of_its_minor_version(installed):
    assert misfit("3.11", installed) is None


@pytest.mark.parametrize("installed", ["3.10.13", "3.12.1", "3.1.4", "3.110.0"])
def test_another_python_is_one_sentence_with_both_versions_and_the_remedy(installed):
    text = misfit("3.11", installed)
    assert "built for Python 3.11" in text and f"this is Python {installed}." in text
    assert "pip install --no-build-isolation" in text and "\n" not in text


def test_this_build_knows_the_python_that_imports_it():
    assert misfit(_build_info.PYTHON_VERSION, platform.python_version()) is None
