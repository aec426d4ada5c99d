// CountingAllocator for Python through ctypes: tools/bench rerun, and tests of a re-run's memory.
#include "support/counting_allocator.hpp"

using nanlocator::CountingAllocator;

extern "C" {
void counting_allocator_install() {
  CountingAllocator::install();
}
std::int64_t counting_allocator_current() {
  return CountingAllocator::instance().current();
}
std::int64_t counting_allocator_peak() {
  return CountingAllocator::instance().peak();
}
void counting_allocator_restart_peak() {
  CountingAllocator::instance().restart_peak();
}
/// Negative: no limit.
void counting_allocator_set_limit(std::int64_t bytes) {
  if (bytes < 0) {
    CountingAllocator::instance().remove_limit();
  } else {
    CountingAllocator::instance().set_limit(bytes);
  }
}
}
