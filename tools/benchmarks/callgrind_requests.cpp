// Loaded with ctypes by tools/bench overhead --instructions: starts and stops callgrind's counting.
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
