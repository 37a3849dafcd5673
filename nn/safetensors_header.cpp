#include "nn/safetensors_header.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "kernels/runtime/check.h"

namespace heddle::nn {
namespace {

constexpr std::int64_t kMaxInt64 = std::numeric_limits<std::int64_t>::max();

// Bits an element of every dtype of the format; -1 for a name that is not in it.
int bits_of(std::string_view dtype) {
  struct Entry {
    std::string_view name;
    int bits;
  };
  constexpr std::array kTable = {
      Entry{"BOOL", 8},    Entry{"U8", 8},       Entry{"I8", 8},       Entry{"F8_E5M2", 8}, Entry{"F8_E4M3", 8},
      Entry{"F8_E8M0", 8}, Entry{"I16", 16},     Entry{"U16", 16},     Entry{"F16", 16},    Entry{"BF16", 16},
      Entry{"I32", 32},    Entry{"U32", 32},     Entry{"F32", 32},     Entry{"I64", 64},    Entry{"U64", 64},
      Entry{"F64", 64},    Entry{"C64", 64},     Entry{"F4", 4},       Entry{"F6_E2M3", 6}, Entry{"F6_E3M2", 6},
  };
  for (const Entry& entry : kTable)
    if (entry.name == dtype) return entry.bits;
  return -1;
}

// Events of the JSON parser, turned into the index. The parser keeps no tree, and nesting beyond the three levels of
// the format is refused at its first bracket, so neither depth nor a lying length can exhaust stack or memory.
class HeaderEvents {
 public:
  HeaderEvents(SafetensorsHeader& header, const std::string& where) : header_(header), where_(where) {}

  bool start_object(std::size_t) {
    if (at_ == At::start) {
      at_ = At::top;
    } else if (at_ == At::top && name_ == kSafetensorsMetadata) {
      check(!has_metadata_, "appears twice");
      has_metadata_ = true;
      at_ = At::metadata;
    } else {
      if (at_ != At::top) refuse("an object");
      check(header_.tensors.count(name_) == 0, "appears twice");
      info_ = {};
      seen_ = {};
      n_offsets_ = 0;
      at_ = At::entry;
    }
    return true;
  }

  bool key(std::string& text) {
    if (at_ == At::top) {
      name_ = std::move(text);
    } else if (at_ == At::metadata) {
      key_ = std::move(text);
      check(header_.metadata.count(key_) == 0, concat_text("holds the key ", quoted(key_), " twice"));
    } else {
      const auto field = std::find(kFields.begin(), kFields.end(), text);
      check(field != kFields.end(), concat_text("has the unknown key ", quoted(text)));
      field_ = static_cast<std::size_t>(field - kFields.begin());
      check(!seen_[field_], concat_text("has ", *field, " twice"));
      seen_[field_] = true;
    }
    return true;
  }

  bool end_object() {
    if (at_ == At::entry) {
      for (std::size_t i = 0; i < kFields.size(); ++i) check(seen_[i], concat_text("lacks ", kFields[i]));
      header_.tensors.emplace(name_, std::move(info_));
    }
    at_ = at_ == At::top ? At::start : At::top;
    return true;
  }

  bool start_array(std::size_t) {
    if (at_ != At::entry || field_ == kDType) refuse("an array");
    at_ = field_ == kShape ? At::shape : At::offsets;
    return true;
  }

  bool end_array() {
    check(at_ != At::offsets || n_offsets_ == 2, concat_text("has ", n_offsets_, " data_offsets, 2 are needed"));
    at_ = At::entry;
    return true;
  }

  bool string(std::string& text) {
    if (at_ == At::metadata) {
      header_.metadata.emplace(key_, std::move(text));
    } else {
      if (at_ != At::entry || field_ != kDType) refuse("a string");
      info_.dtype = std::move(text);
    }
    return true;
  }

  bool number_unsigned(std::uint64_t value) {
    if ((at_ != At::shape && at_ != At::offsets) || value > static_cast<std::uint64_t>(kMaxInt64))
      refuse(std::to_string(value));
    const auto number = static_cast<std::int64_t>(value);
    if (at_ == At::shape) {
      check(info_.shape.rank() < kMaxRank, concat_text("has more than ", kMaxRank, " dimensions, the most heddle reads"));
      info_.shape.push_back(number);
    } else {
      check(n_offsets_ < 2, "has more than 2 data_offsets");
      (n_offsets_ == 0 ? info_.begin : info_.end) = number;
      ++n_offsets_;
    }
    return true;
  }

  bool number_integer(std::int64_t value) { refuse(std::to_string(value)); }
  bool number_float(double, const std::string& text) { refuse(text.substr(0, 40)); }
  bool boolean(bool value) { refuse(value ? "true" : "false"); }
  bool null() { refuse("null"); }
  bool binary(std::vector<std::uint8_t>&) { refuse("binary data"); }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) {
    throw Error(concat_text(where_, ": the header is not valid JSON at its byte ", position));
  }

 private:
  enum class At { start, top, entry, shape, offsets, metadata };
  static constexpr std::array<std::string_view, 3> kFields = {"dtype", "shape", "data_offsets"};
  static constexpr std::size_t kDType = 0, kShape = 1;

  static std::string quoted(std::string_view text) { return concat_text('\'', printable(text.substr(0, 100)), '\''); }

  // Where the parser stands: the metadata or one tensor.
  std::string subject() const {
    return name_ == kSafetensorsMetadata ? std::string(kSafetensorsMetadata) : describe_tensor_name(name_);
  }

  void check(bool condition, std::string_view problem) const {
    HEDDLE_CHECK(condition, where_, ": ", subject(), " ", problem);
  }

  // A JSON value of the wrong kind for its place.
  [[noreturn]] void refuse(std::string_view given) const {
    if (at_ == At::top) throw Error(concat_text(where_, ": ", subject(), " must be an object, got ", given));
    if (at_ == At::metadata)
      throw Error(concat_text(where_, ": ", subject(), " key ", quoted(key_), " must be a string, got ", given));
    const char* expected = field_ == kDType ? "a string" : "an array of integers from 0 to 2^63-1";
    throw Error(concat_text(where_, ": ", subject(), " ", kFields[field_], " must be ", expected, ", got ", given));
  }

  SafetensorsHeader& header_;
  const std::string& where_;
  At at_ = At::start;
  bool has_metadata_ = false;
  std::string name_;  // of the tensor, or "__metadata__"
  std::string key_;   // inside the metadata
  std::size_t field_ = 0;
  std::array<bool, 3> seen_{};
  int n_offsets_ = 0;
  SafetensorsInfo info_;
};

// Bits that shape and dtype call for, -1 where 64 bits cannot hold the number. The product of the sizes other than zero
// must fit too: strides are made of it.
std::int64_t dense_nbits(const Shape& shape, int bits) {
  std::int64_t nbits = bits;
  for (std::int64_t size : shape)
    if (__builtin_mul_overflow(nbits, std::max<std::int64_t>(size, 1), &nbits)) return -1;
  return shape.numel() == 0 ? 0 : nbits;
}

void check_size(const std::string& tensor, const SafetensorsInfo& info) {
  const int bits = bits_of(info.dtype);
  const std::int64_t nbits = dense_nbits(info.shape, bits < 0 ? 8 : bits);
  HEDDLE_CHECK(nbits >= 0, tensor, " has shape ", info.shape, ", whose size overflows 64 bits");
  // A dtype newer than this reader: its size is unknown, and reading the tensor is refused.
  if (bits < 0) return;
  HEDDLE_CHECK(nbits % 8 == 0, tensor, " of shape ", info.shape, " and dtype ", info.dtype, " takes ", nbits,
               " bits, which is not a whole number of bytes");
  HEDDLE_CHECK(nbits / 8 == info.nbytes(), tensor, " of shape ", info.shape, " and dtype ", info.dtype, " takes ", nbits / 8,
               " bytes, its data_offsets [", info.begin, ", ", info.end, "] hold ", info.nbytes());
}

// The byte ranges must cover the data exactly: no hole, no overlap, nothing left at either end.
void check_ranges(const SafetensorsHeader& header, std::int64_t data_nbytes, const std::string& where) {
  using Entry = std::pair<const std::string, SafetensorsInfo>;
  std::vector<const Entry*> order;
  for (const Entry& entry : header.tensors) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const Entry* a, const Entry* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  std::int64_t covered = 0;
  for (const Entry* entry : order) {
    const std::string tensor = where + ": " + describe_tensor_name(entry->first);
    const SafetensorsInfo& info = entry->second;
    HEDDLE_CHECK(info.begin <= info.end, tensor, " has reversed data_offsets [", info.begin, ", ", info.end, "]");
    HEDDLE_CHECK(info.end <= data_nbytes, tensor, " ends at byte ", info.end, " of the data, the file holds ", data_nbytes,
                 "; it is cut short or damaged");
    check_size(tensor, info);
    HEDDLE_CHECK(info.begin == covered, tensor, " starts at byte ", info.begin,
                 " of the data, the tensor before it ends at ", covered, "; the format forbids ", info.begin < covered ? "overlaps" : "holes");
    covered = info.end;
  }
  HEDDLE_CHECK(covered == data_nbytes, where, ": the tensors end at byte ", covered, " of the data, the file holds ",
               data_nbytes, "; trailing bytes are forbidden");
}

}  // namespace

std::string describe_tensor_name(std::string_view name) {
  constexpr std::size_t kMost = 200;
  return concat_text("tensor '", printable(name.substr(0, kMost)), name.size() > kMost ? "...'" : "'");
}

SafetensorsHeader parse_safetensors_header(std::string_view text, std::int64_t data_nbytes, const std::string& where) {
  HEDDLE_CHECK(text.substr(0, 1) == "{", where, ": the header must be a JSON object, starting with '{'");
  // The parser would take a zero byte for the end of the text.
  const std::size_t zero = text.find('\0');
  HEDDLE_CHECK(zero == std::string_view::npos, where, ": the header is not valid JSON at its byte ", zero + 1);
  SafetensorsHeader header;
  HeaderEvents events(header, where);
  nlohmann::json::sax_parse(text.begin(), text.end(), &events);
  check_ranges(header, data_nbytes, where);
  return header;
}

}  // namespace heddle::nn
