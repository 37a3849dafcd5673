#include "nn/config_field.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "kernels/runtime/check.h"

namespace heddle::nn {
namespace {

template <typename... Cases>
struct Overload : Cases... {
  using Cases::operator()...;
};
template <typename... Cases>
Overload(Cases...) -> Overload<Cases...>;

std::string join(const std::vector<std::string_view>& names) {
  std::string out;
  for (std::string_view name : names) out.append(out.empty() ? "" : ", ").append(name);
  return out;
}

std::string with_bound(std::string_view type, const Range& range) {
  const std::string bound = range.text();
  return std::string(type) + (bound.empty() ? "" : " " + bound);
}

std::string list_text(const std::vector<std::string>& items) {
  std::string out = "[";
  for (const std::string& item : items) out.append(out.size() == 1 ? "" : ", ").append(quoted_text(item));
  return out + "]";
}

}  // namespace

bool Range::contains(double value) const {
  const bool above_low = low_included ? value >= low : value > low;
  const bool below_high = high_included ? value <= high : value < high;
  return std::isfinite(value) && above_low && below_high;
}

std::string Range::text() const {
  if (std::isinf(low) && std::isinf(high)) return "";
  if (std::isinf(high)) return (low_included ? ">= " : "> ") + number_text(low);
  const std::string ends = number_text(low) + ", " + number_text(high);
  return (low_included ? "in [" : "in (") + ends + (high_included ? "]" : ")");
}

bool Field::in_bounds() const {
  const auto good_text = [this](const std::string& text) {
    return !text.empty() && (rule.accepts == nullptr || rule.accepts(text));
  };
  return std::visit(
      Overload{
          [](const bool*) { return true; },
          [&](const std::int64_t* value) { return rule.range.contains(static_cast<double>(*value)); },
          [&](const double* value) { return rule.range.contains(*value); },
          [&](const std::string* value) { return good_text(*value); },
          [&](const std::vector<std::string>* value) {
            return !value->empty() && std::ranges::all_of(*value, good_text);
          },
          [](const Choice&) { return true; },
          [](const std::optional<bool>*) { return true; },
          [&](const std::optional<std::int64_t>* value) {
            return !*value || rule.range.contains(static_cast<double>(**value));
          },
          [&](const std::optional<std::string>* value) { return !*value || good_text(**value); },
          [&](const auto* by_name) {
            return std::ranges::all_of(*by_name, [&](const auto& entry) {
              return good_text(entry.first) && rule.range.contains(static_cast<double>(entry.second));
            });
          },
      },
      target);
}

std::string Field::expected() const {
  const std::string text(rule.form.empty() ? "non-empty string" : rule.form);
  return std::visit(Overload{
                        [](const bool*) -> std::string { return "true or false"; },
                        [&](const std::int64_t*) { return with_bound("integer", rule.range); },
                        [&](const double*) { return with_bound("number", rule.range); },
                        [&](const std::string*) { return text; },
                        [&](const std::vector<std::string>*) -> std::string {
                          return rule.takes_one ? "non-empty string or list of them" : "non-empty list of non-empty strings";
                        },
                        [&](const Choice& choice) {
                          const std::string note = rule.form.empty() ? "" : concat_text(" (", rule.form, ")");
                          return "one of " + join(choice.names) + (choice.clear ? ", null" : "") + note;
                        },
                        [](const std::optional<bool>*) -> std::string { return "true, false or null"; },
                        [&](const std::optional<std::int64_t>*) {
                          return with_bound("integer", rule.range) + " or null";
                        },
                        [&](const std::optional<std::string>*) { return text + " or null"; },
                        [&](const ByName<std::int64_t>*) { return concat_text("map of ", rule.form, " to ", with_bound("integer", rule.range)); },
                        [&](const ByName<double>*) { return concat_text("map of ", rule.form, " to ", with_bound("number", rule.range)); },
                    },
                    target);
}

std::string Field::value_text() const {
  const auto boolean = [](bool value) -> std::string { return value ? "true" : "false"; };
  return std::visit(
      Overload{
          [&](const bool* value) { return boolean(*value); },
          [](const std::int64_t* value) { return std::to_string(*value); },
          [](const double* value) { return number_text(*value); },
          [](const std::string* value) { return quoted_text(*value); },
          [](const std::vector<std::string>* value) { return list_text(*value); },
          [](const Choice& choice) { return std::string(choice.get().value_or("null")); },
          [&](const std::optional<bool>* value) { return *value ? boolean(**value) : "null"; },
          [](const std::optional<std::int64_t>* value) { return *value ? std::to_string(**value) : "null"; },
          [](const std::optional<std::string>* value) { return *value ? quoted_text(**value) : "null"; },
          [](const auto* by_name) {
            std::string out = "{";
            for (const auto& [name, value] : *by_name)
              out.append(out.size() == 1 ? "" : ", ").append(quoted_text(name) + ": " + number_text(static_cast<double>(value)));
            return out + "}";
          },
      },
      target);
}

void require_valid(std::string_view section, const std::vector<Field>& fields, const std::vector<Conflict>& conflicts) {
  std::string errors;
  const auto report = [&](const std::string& key, const std::string& text) {
    errors.append(errors.empty() ? "" : "\n").append(section).append(".").append(key).append(": expected ").append(text);
  };
  for (const Field& field : fields)
    if (!field.in_bounds()) report(field.key, field.expected() + ", got " + field.value_text());
  for (const Conflict& conflict : conflicts) {
    const std::string other = conflict.other + " (" + conflict.other_value + ")";
    report(conflict.key, conflict.expected + " " + other + ", got " + conflict.got);
  }
  if (!errors.empty()) throw ConfigError(errors);
}

std::string number_text(double value) {
  char buffer[32];  // the shortest form of a double has at most 24 characters
  const auto [end, status] = std::to_chars(buffer, buffer + sizeof buffer, value);
  return std::string(buffer, end);
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replace = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replace});
    }
  }
  return row.back();
}

std::string quoted_text(std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out.append({'\\', c});
    } else if (byte < 0x20 || byte == 0x7f) {
      out.append({'\\', 'x', kHex[byte >> 4], kHex[byte & 15]});
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace heddle::nn
