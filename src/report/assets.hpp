// The files that the library carries: src/report/phrasebook.txt and those of src/report/page,
// embedded by src/report/embed.cmake when it is built.
#pragma once

#include <string_view>

namespace nanlocator::assets {

extern const std::string_view kPhrasebook;  // phrasebook.txt
extern const std::string_view kTemplate;    // page.html; {{name}} is replaced in each report
extern const std::string_view kStyle;       // style.css
extern const std::string_view kScript;      // script.js
// "sha256-..." of style and script, for the Content-Security-Policy.
extern const std::string_view kStyleHash;
extern const std::string_view kScriptHash;

}  // namespace nanlocator::assets
