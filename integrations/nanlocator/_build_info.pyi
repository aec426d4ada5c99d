# Types of the file that CMake writes (integrations/CMakeLists.txt).
VERSION: str
TORCH_VERSION: str
PYTHON_VERSION: str
CXX11_ABI: bool
CUDA: bool
CUDA_COMPILER_VERSION: str | None
