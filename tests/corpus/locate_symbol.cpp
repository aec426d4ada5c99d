// What is left undefined here is nanlocator::locate, by the name that the linker has for it: that
// name has the namespaces and types of its declaration, so name_locate.cmake reads what the
// compiler made of it.
#include "nanlocator/locate/locate.hpp"

extern nanlocator::Verdict (*const nanlocator_locate)(std::span<const nanlocator::Ledger>, int);
nanlocator::Verdict (*const nanlocator_locate)(std::span<const nanlocator::Ledger>,
                                               int) = &nanlocator::locate;
