"""Whether the extension fits the imported torch. Imports neither."""

import re

REMEDY = (
    "Rebuild nanlocator in this environment: "
    "pip install --no-build-isolation --force-reinstall --no-deps <source folder>"
)


def misfit(built: str, has_new_abi_built: bool, installed: str, has_new_abi_installed: bool) -> str | None:
    """Returns a sentence if an extension that was built against one torch cannot be loaded with another, else
    None.

    Torch's C++ classes keep their layout within a minor version: 2.11.0, 2.11.1+cu129 and 2.11.0a0+nv26.04
    are alike. ``has_new_abi``: whether ``std::string`` is libstdc++'s C++11 version
    (``torch.compiled_with_cxx11_abi()``).
    """
    if _minor(built) != _minor(installed):
        difference = f"was built against torch {built}, but torch {installed} is installed"
    elif has_new_abi_built != has_new_abi_installed:
        difference = (
            f"was built with _GLIBCXX_USE_CXX11_ABI={int(has_new_abi_built)}, but torch {installed} uses "
            f"{int(has_new_abi_installed)}"
        )
    else:
        return None
    return f"nanlocator {difference}: their C++ classes differ. {REMEDY}"


def _minor(version: str) -> str:
    """The "2.11" of "2.11.0a0+nv26.04"; the whole version if it is not a release's, such as "main"."""
    found = re.match(r"\d+\.\d+(?!\d)", version)
    return found.group() if found else version
