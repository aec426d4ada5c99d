// The only undefined symbol here is nanlocator::locate. Its linker name includes the namespaces and
// types of its declaration, so name_locate.cmake reads it from the compiler's output.
#include "nanlocator/locate/locate.hpp"

extern nanlocator::Verdict (*const nanlocator_locate)(std::span<const nanlocator::Ledger>, int);
nanlocator::Verdict (*const nanlocator_locate)(std::span<const nanlocator::Ledger>,
                                               int) = &nanlocator::locate;
