#include "lora/name_pattern.h"

#include <algorithm>
#include <charconv>
#include <regex>

#include "nn/posix_file.h"

namespace heddle::lora {
namespace {

constexpr std::size_t kMaxLength = 500;
constexpr int kMaxDepth = 20;      // of groups, for each of which the library recurses
constexpr int kMaxCopies = 16;     // of a part, as x{2,8} asks for: copies are states of their own, and the library recurses over states
constexpr int kMaxLookaheads = 2;  // each may start at every character, also of those that another one looks at

// libstdc++'s matcher that follows all states at once. It throws for back references.
std::regex regex_of(const std::string& pattern) {
  return std::regex(pattern, std::regex::ECMAScript | std::regex::nosubs | std::regex_constants::__polynomial);
}

// The larger number of a count "{2,8" that starts at its bracket; 1 if there is none.
int largest_count(std::string_view text) {
  int largest = 1;
  while (!text.empty() && (text[0] == '{' || text[0] == ',')) {
    int count = 1;
    const auto [end, status] = std::from_chars(text.data() + 1, text.data() + text.size(), count);
    largest = status == std::errc::result_out_of_range ? kMaxCopies + 1 : std::max(largest, count);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (status != std::errc()) break;
  }
  return std::min(largest, kMaxCopies + 1);
}

// The limits of Note: Patterns of names. Brackets of a set count as if they were outside, which refuses more than it must.
std::string_view limit_problem(std::string_view pattern) {
  if (pattern.size() > kMaxLength) return "has more than 500 characters";
  int depth = 0, lookaheads = 0, copies = 1;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const std::string_view rest = pattern.substr(i);
    if (rest[0] == '\\') ++i;
    if (rest[0] == '(') ++depth;
    if (rest[0] == ')') --depth;
    if (rest[0] == '{') copies *= largest_count(rest);  // as if each were inside the one before
    if (rest.starts_with("(?=") || rest.starts_with("(?!")) ++lookaheads;
    if (depth > kMaxDepth) return "has groups in more than 20 levels";
    if (lookaheads > kMaxLookaheads) return "has more than 2 look-aheads";
    if (copies > kMaxCopies) return "repeats parts by counts whose product is over 16";
  }
  return {};
}

}  // namespace

std::string_view pattern_problem(const std::string& pattern) {
  if (const std::string_view problem = limit_problem(pattern); !problem.empty()) return problem;
  try {
    regex_of(pattern);
    return {};
  } catch (const std::regex_error&) {
    return "is not a regular expression without back references";
  }
}

std::string start_of(std::string_view text) { return nn::printable(nn::shortened(text)); }

bool fits_name(const std::string& pattern, const std::string& name) { return std::regex_match(name, regex_of(pattern)); }

bool fits_ending(const std::string& pattern, const std::string& name) { return fits_name("(.*\\.)?(" + pattern + ")", name); }

}  // namespace heddle::lora
