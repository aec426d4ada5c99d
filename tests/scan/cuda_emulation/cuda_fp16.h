// Stands in for NVIDIA's header of this name: what the kernels use of it.
#pragma once

#include <cstring>

struct __half {
  unsigned short bits;
};

inline __half __ushort_as_half(unsigned short bits) {
  return {bits};
}
inline float __half2float(__half half) {
  _Float16 value;
  std::memcpy(&value, &half.bits, sizeof value);
  return static_cast<float>(value);
}
