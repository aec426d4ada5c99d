// The files of src/report/page, embedded by src/report/page/embed.cmake when the library is built.
#pragma once

#include <string_view>

namespace nanlocator::page_assets {

extern const std::string_view kTemplate;  // page.html; {{name}} is replaced in each report
extern const std::string_view kStyle;     // style.css
extern const std::string_view kScript;    // script.js
// "sha256-..." of style and script, for the Content-Security-Policy.
extern const std::string_view kStyleHash;
extern const std::string_view kScriptHash;

}  // namespace nanlocator::page_assets
