"""The torch versions with which an extension may be loaded, decided from version strings alone."""

import pytest
import torch

from nanlocator import _build_info
from nanlocator.engine.torch_versions import misfit


@pytest.mark.parametrize(
    "installed", ["2.11.0", "2.11.1+cu129", "2.11.0a0+nv26.04", "2.11.3.dev20260401", "2.11"]
)
def test_a_build_fits_every_torch_of_its_minor_version(installed):
    assert misfit("2.11.0+cu130", True, installed, True) is None


@pytest.mark.parametrize("installed", ["2.12.0", "2.1.0", "2.1", "2.110.0", "3.11.0", "main"])
def test_another_minor_version_is_one_sentence_with_both_versions_and_the_remedy(installed):
    text = misfit("2.11.0", True, installed, True)
    assert "torch 2.11.0" in text and f"torch {installed} is installed" in text
    assert "pip install --no-build-isolation" in text
    assert "\n" not in text


def test_the_same_version_with_the_older_string_of_libstdcxx_does_not_fit():
    text = misfit("2.6.0", True, "2.6.0+cu124", False)
    assert "_GLIBCXX_USE_CXX11_ABI=1" in text and "torch 2.6.0+cu124 uses 0" in text


def test_this_build_knows_the_abi_of_the_torch_beside_it():
    assert _build_info.CXX11_ABI == torch.compiled_with_cxx11_abi()
