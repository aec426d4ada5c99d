// The results of executing a kernel's call again, as facts.
#pragma once

#include <string>

#include "nanlocator/record/birth.hpp"
#include "nanlocator/verdict/fact.hpp"

namespace nanlocator::inline verdict_room {

/// `kernel`: the kernel's name.
void append_kernel_facts(Facts& facts, const KernelReplay& replay, const std::string& kernel);

}  // namespace nanlocator::inline verdict_room
