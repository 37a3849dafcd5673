#include "nn/safetensors_header.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>

#include "kernels/runtime/allocator.h"
#include "nn/safetensors.h"
#include "tests/support/allocation_watch.h"
#include "tests/support/safetensors_bytes.h"
#include "tests/support/temp_folder.h"

namespace heddle::nn {
namespace {

using test::file_bytes;
using test::TempFolder;
using test::write_raw;

// The error of opening a file of these bytes, with the file's name written as F; "" if it opens.
std::string open_error(const std::string& bytes) {
  const TempFolder folder;
  const auto path = folder / "model.safetensors";
  write_raw(path, bytes);
  try {
    SafetensorsFile file(path);
    return "";
  } catch (const Error& error) {
    const std::string text = error.what();
    const auto at = text.find(path.native());
    if (at == std::string::npos) return text;
    return concat_text(text.substr(0, at), 'F', text.substr(at + path.native().size()));
  }
}

std::string header_error(const std::string& header, const std::string& data = "") {
  return open_error(file_bytes(header, data));
}

// One F32 tensor 'a' of shape [1] with the given data_offsets, and 4 bytes of data.
std::string offsets_error(const std::string& offsets) {
  return header_error(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":)" + offsets + "}}", "1234");
}

// One F32 tensor 'a' with the given shape, no data.
std::string shape_error(const std::string& shape) {
  return header_error(R"({"a":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":[0,0]}})");
}

const std::string kOne = R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})";

// --- Length of the header ---

TEST(SafetensorsLength, FileShorterThanTheLengthIsRefused) {
  EXPECT_EQ(open_error(""), "safetensors: F: the file has 0 bytes, at least 8 are needed");
  EXPECT_EQ(open_error("1234567"), "safetensors: F: the file has 7 bytes, at least 8 are needed");
}

TEST(SafetensorsLength, LengthTooSmallForAnObjectIsRefused) {
  EXPECT_EQ(header_error(""), "safetensors: F: header length 0 is too small, at least 2 is needed");
  EXPECT_EQ(header_error("{"), "safetensors: F: header length 1 is too small, at least 2 is needed");
}

TEST(SafetensorsLength, LengthBeyondTheFileIsRefused) {
  std::string bytes = file_bytes("{}      ");

  bytes[0] = 9;

  EXPECT_EQ(open_error(bytes),
            "safetensors: F: header length 9 does not fit in the file, which has 8 bytes after the length");
}

TEST(SafetensorsLength, LengthThatWrapsAroundIsRefused) {
  EXPECT_EQ(open_error(std::string(8, '\xFF') + "{}"),
            "safetensors: F: header length 18446744073709551615 is above the limit of 100000000; is it a safetensors file?");
}

TEST(SafetensorsLength, LyingLengthAllocatesNothingOfThatSize) {
  std::string bytes = file_bytes("{}      ");
  for (const std::uint64_t length : {std::uint64_t{1} << 40, std::uint64_t{99'999'999}, std::uint64_t{1} << 63}) {
    for (int i = 0; i < 8; ++i) bytes[static_cast<std::size_t>(i)] = static_cast<char>(length >> (8 * i) & 0xFF);
    const test::AllocationWatch watch;

    const std::string error = open_error(bytes);

    EXPECT_NE(error, "");
    EXPECT_LT(watch.largest(), 65536u) << "length " << length;
  }
}

// --- JSON ---

TEST(SafetensorsJson, HeaderThatIsNotAnObjectIsRefused) {
  const std::string expected = "safetensors: F: the header must be a JSON object, starting with '{'";
  EXPECT_EQ(header_error("[]"), expected);
  EXPECT_EQ(header_error("hello"), expected);
  EXPECT_EQ(header_error(" {}"), expected);
}

TEST(SafetensorsJson, BrokenTextIsRefused) {
  for (const char* header : {R"({"a")", "{}}", "{} x", R"({"a":})", "{\"\xFF\":1}", R"({"\ud800":1})", "{,}"})
    EXPECT_NE(header_error(header).find("the header is not valid JSON at its byte"), std::string::npos) << header;
}

TEST(SafetensorsJson, TextAfterAZeroByteIsRefused) {
  EXPECT_EQ(header_error(std::string("{}\0x", 4)), "safetensors: F: the header is not valid JSON at its byte 3");
}

TEST(SafetensorsJson, DeepNestingIsRefusedAtItsFirstExtraBracket) {
  const std::string brackets(100'000, '[');

  EXPECT_EQ(header_error("{\"a\":" + brackets), "safetensors: F: tensor 'a' must be an object, got an array");
  EXPECT_EQ(header_error(R"({"a":{"shape":)" + brackets),
            "safetensors: F: tensor 'a' shape must be an array of integers from 0 to 2^63-1, got an array");
}

TEST(SafetensorsJson, DeeplyNestedObjectsAreRefused) {
  std::string header;
  for (int i = 0; i < 100'000; ++i) header += R"({"dtype":)";

  EXPECT_EQ(header_error(header), "safetensors: F: tensor 'dtype' dtype must be a string, got an object");
}

TEST(SafetensorsJson, DuplicateKeysAreRefused) {
  EXPECT_EQ(header_error("{\"a\":" + kOne + ",\"a\":" + kOne + "}", "1"), "safetensors: F: tensor 'a' appears twice");
  EXPECT_EQ(header_error(R"({"a":{"dtype":"U8","dtype":"U8"}})"), "safetensors: F: tensor 'a' has dtype twice");
  EXPECT_EQ(header_error(R"({"__metadata__":{},"__metadata__":{}})"), "safetensors: F: __metadata__ appears twice");
  EXPECT_EQ(header_error(R"({"__metadata__":{"k":"1","k":"1"}})"),
            "safetensors: F: __metadata__ holds the key 'k' twice");
}

TEST(SafetensorsJson, EntriesOfTheWrongFormAreRefused) {
  EXPECT_EQ(header_error(R"({"a":1})"), "safetensors: F: tensor 'a' must be an object, got 1");
  EXPECT_EQ(header_error(R"({"a":null})"), "safetensors: F: tensor 'a' must be an object, got null");
  EXPECT_EQ(header_error(R"({"a":{}})"), "safetensors: F: tensor 'a' lacks dtype");
  EXPECT_EQ(header_error(R"({"a":{"dtype":"U8","shape":[1]}})"), "safetensors: F: tensor 'a' lacks data_offsets");
  EXPECT_EQ(header_error(R"({"a":{"dtype":8}})"), "safetensors: F: tensor 'a' dtype must be a string, got 8");
  EXPECT_EQ(header_error(R"({"a":{"strides":[1]}})"), "safetensors: F: tensor 'a' has the unknown key 'strides'");
  EXPECT_EQ(header_error(R"({"__metadata__":{"k":1}})"), "safetensors: F: __metadata__ key 'k' must be a string, got 1");
  EXPECT_EQ(header_error(R"({"__metadata__":[]})"), "safetensors: F: __metadata__ must be an object, got an array");
}

TEST(SafetensorsJson, UnprintableNamesAreEscapedAndCutInErrors) {
  EXPECT_EQ(header_error(R"({"a\u0000\n\u001b[2J":1})"),
            R"(safetensors: F: tensor 'a\x00\x0A\x1B[2J' must be an object, got 1)");
  EXPECT_LT(header_error("{\"" + std::string(1'000'000, 'n') + "\":1}").size(), 400u);
}

// --- Shapes and offsets ---

TEST(SafetensorsRanges, OffsetsOfTheWrongTypeAreRefused) {
  const std::string expected =
      "safetensors: F: tensor 'a' data_offsets must be an array of integers from 0 to 2^63-1, got ";
  EXPECT_EQ(offsets_error("[-4,0]"), expected + "-4");
  EXPECT_EQ(offsets_error("[0.5,4]"), expected + "0.5");
  EXPECT_EQ(offsets_error("[0,4e0]"), expected + "4e0");
  EXPECT_EQ(offsets_error("[0,18446744073709551615]"), expected + "18446744073709551615");
  EXPECT_EQ(offsets_error("[0,18446744073709551616]"), expected + "18446744073709551616");
  EXPECT_EQ(offsets_error("[0,9223372036854775808]"), expected + "9223372036854775808");
  EXPECT_EQ(offsets_error("[\"0\",4]"), expected + "a string");
  EXPECT_EQ(offsets_error("4"), expected + "4");
  EXPECT_EQ(offsets_error("{}"), expected + "an object");
}

TEST(SafetensorsRanges, AnyNumberOfOffsetsButTwoIsRefused) {
  EXPECT_EQ(offsets_error("[]"), "safetensors: F: tensor 'a' has 0 data_offsets, 2 are needed");
  EXPECT_EQ(offsets_error("[0]"), "safetensors: F: tensor 'a' has 1 data_offsets, 2 are needed");
  EXPECT_EQ(offsets_error("[0,4,8]"), "safetensors: F: tensor 'a' has more than 2 data_offsets");
}

TEST(SafetensorsRanges, ReversedOffsetsAreRefused) {
  EXPECT_EQ(offsets_error("[4,0]"), "safetensors: F: tensor 'a' has reversed data_offsets [4, 0]");
}

TEST(SafetensorsRanges, ShapeAndByteRangeMustAgree) {
  EXPECT_EQ(header_error(R"({"a":{"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4]}})", "1234"),
            "safetensors: F: tensor 'a' of shape [1000, 1000] and dtype F32 takes 4000000 bytes, its data_offsets [0, 4] "
            "hold 4");
  EXPECT_EQ(header_error(R"({"a":{"dtype":"F32","shape":[32,8],"data_offsets":[0,65536]}})", std::string(65536, 'x')),
            "safetensors: F: tensor 'a' of shape [32, 8] and dtype F32 takes 1024 bytes, its data_offsets [0, 65536] hold "
            "65536");
}

TEST(SafetensorsRanges, SizesOfTheWrongTypeAreRefused) {
  const std::string expected = "safetensors: F: tensor 'a' shape must be an array of integers from 0 to 2^63-1, got ";
  EXPECT_EQ(shape_error("[-1]"), expected + "-1");
  EXPECT_EQ(shape_error("[1.0]"), expected + "1.0");
  EXPECT_EQ(shape_error("[1e400]").find("safetensors: F: the header is not valid JSON"), 0u);
  EXPECT_EQ(shape_error("[null]"), expected + "null");
  EXPECT_EQ(shape_error("[true]"), expected + "true");
}

TEST(SafetensorsRanges, ProductsThatOverflowAreRefused) {
  const std::string end = ", whose size overflows 64 bits";
  EXPECT_EQ(shape_error("[4611686018427387904,4]"),
            "safetensors: F: tensor 'a' has shape [4611686018427387904, 4]" + end);
  EXPECT_EQ(shape_error("[9223372036854775807]"), "safetensors: F: tensor 'a' has shape [9223372036854775807]" + end);
  EXPECT_EQ(shape_error("[0,4611686018427387904,4]"),
            "safetensors: F: tensor 'a' has shape [0, 4611686018427387904, 4]" + end);
}

TEST(SafetensorsRanges, RankAboveSixIsRefused) {
  EXPECT_EQ(shape_error("[1,1,1,1,1,1,0]"),
            "safetensors: F: tensor 'a' has more than 6 dimensions, the most heddle reads");
}

// Two U8 tensors 'a' and 'b' of 8 bytes.
std::string two_ranges(const std::string& a, const std::string& b, std::size_t data_nbytes) {
  return header_error(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":)" + a +
                          R"(},"b":{"dtype":"U8","shape":[8],"data_offsets":)" + b + "}}",
                      std::string(data_nbytes, 'x'));
}

TEST(SafetensorsRanges, OverlapsAreRefused) {
  EXPECT_EQ(two_ranges("[0,8]", "[0,8]", 8),
            "safetensors: F: tensor 'b' starts at byte 0 of the data, the tensor before it ends at 8; the format forbids "
            "overlaps");
  EXPECT_EQ(two_ranges("[4,12]", "[0,8]", 12),
            "safetensors: F: tensor 'a' starts at byte 4 of the data, the tensor before it ends at 8; the format forbids "
            "overlaps");
}

TEST(SafetensorsRanges, HolesAreRefused) {
  EXPECT_EQ(two_ranges("[0,8]", "[12,20]", 20),
            "safetensors: F: tensor 'b' starts at byte 12 of the data, the tensor before it ends at 8; the format forbids "
            "holes");
  EXPECT_EQ(two_ranges("[4,12]", "[12,20]", 20),
            "safetensors: F: tensor 'a' starts at byte 4 of the data, the tensor before it ends at 0; the format forbids "
            "holes");
}

TEST(SafetensorsRanges, FileCutByOneByteIsRefused) {
  EXPECT_EQ(two_ranges("[0,8]", "[8,16]", 15),
            "safetensors: F: tensor 'b' ends at byte 16 of the data, the file holds 15; it is cut short or damaged");
}

TEST(SafetensorsRanges, EveryShorterFileIsRefused) {
  const std::string whole = file_bytes("{\"a\":" + kOne + "}", "1");
  for (std::size_t n = 0; n < whole.size(); ++n) EXPECT_NE(open_error(whole.substr(0, n)), "") << n << " bytes";
  EXPECT_EQ(open_error(whole), "");
}

TEST(SafetensorsRanges, TrailingDataAreRefused) {
  EXPECT_EQ(two_ranges("[0,8]", "[8,16]", 17),
            "safetensors: F: the tensors end at byte 16 of the data, the file holds 17; trailing bytes are forbidden");
  EXPECT_EQ(header_error("{}", "x"),
            "safetensors: F: the tensors end at byte 0 of the data, the file holds 1; trailing bytes are forbidden");
}

TEST(SafetensorsRanges, SubByteTensorsMustFillWholeBytes) {
  EXPECT_EQ(header_error(R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", "12"),
            "safetensors: F: tensor 'a' of shape [3] and dtype F4 takes 12 bits, which is not a whole number of bytes");
  EXPECT_EQ(header_error(R"({"a":{"dtype":"F4","shape":[3,2],"data_offsets":[0,3]}})", "123"), "");
}

// One to three random edits: a flipped bit, a character that JSON cares about, bytes removed or inserted.
std::string damage(std::string bytes, std::mt19937& random) {
  const auto below = [&random](std::size_t n) { return static_cast<std::size_t>(random()) % n; };
  for (std::size_t i = 0, n = 1 + below(3); i < n; ++i) {
    const std::size_t at = below(bytes.size());
    const std::size_t kind = below(4);
    if (kind == 0) bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
    if (kind == 1) bytes[at] = "0123456789{}[]\",:-.e\\ "[below(22)];
    if (kind == 2) bytes.erase(at, 1 + below(4));
    if (kind == 3) bytes.insert(at, 1, static_cast<char>(below(256)));
  }
  return bytes;
}

const std::string kGoodHeader =
    R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
    R"("b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]},"c":{"dtype":"U8","shape":[0,3],"data_offsets":[10,10]}})";

TEST(SafetensorsFuzz, DamagedHeadersGiveErrorsAndSmallAllocations) {
  std::mt19937 random(1234);
  int accepted = 0;
  const test::AllocationWatch watch;
  for (int round = 0; round < 5000; ++round) {
    const std::string text = damage(kGoodHeader, random);
    try {
      parse_safetensors_header(text, 10, "fuzz");
      ++accepted;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(accepted, 0);
  EXPECT_LT(watch.largest(), 65536u);
}

TEST(SafetensorsFuzz, DamagedFilesGiveErrorsAndSmallAllocations) {
  const TempFolder folder;
  const auto path = folder / "fuzz";
  std::mt19937 random(4321);
  reset_peak_memory(kCpu);
  const std::int64_t before = memory_stats(kCpu).current_bytes;
  int accepted = 0;
  const test::AllocationWatch watch;
  for (int round = 0; round < 500; ++round) {
    write_raw(path, damage(file_bytes(kGoodHeader, "0123456789"), random));
    try {
      const SafetensorsFile file(path);
      for (const std::string& name : file.names()) file.read(name);
      ++accepted;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(accepted, 0);
  EXPECT_LT(watch.largest(), 65536u);
  EXPECT_LT(memory_stats(kCpu).peak_bytes - before, 4096);
}

}  // namespace
}  // namespace heddle::nn
