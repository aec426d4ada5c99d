// For tools/bench overhead --instructions, which loads it with ctypes: what callgrind counts, and
// when.
#include <valgrind/callgrind.h>

extern "C" {

void start_counting() {
  CALLGRIND_START_INSTRUMENTATION;
}

/// Writes the counts since start_counting into the next file of --callgrind-out-file.
void stop_counting() {
  CALLGRIND_STOP_INSTRUMENTATION;
  CALLGRIND_DUMP_STATS;
}
}
