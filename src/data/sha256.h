// SHA-256 (FIPS 180-4).
#pragma once
#include <string>
#include <string_view>

namespace marrow {

// 64 hexadecimal digits, as sha256sum prints them.
std::string sha256_hex(std::string_view data);

}  // namespace marrow
