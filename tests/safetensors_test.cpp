#include "nn/safetensors.h"

#include <gtest/gtest.h>

#include <sys/stat.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/runtime/allocator.h"
#include "nn/safetensors_header.h"
#include "tests/support/allocation_watch.h"
#include "tests/support/temp_folder.h"

namespace heddle::nn {
namespace {

using test::TempFolder;

// The bytes of a file: length of the header, header, data. Made here by hand, not by the writer under test.
std::string file_bytes(const std::string& header, const std::string& data = "") {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> (8 * i) & 0xFF);
  return bytes + header + data;
}

void write_raw(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

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
            "safetensors: F: header length 18446744073709551615 is above the limit of 100000000");
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

// --- Reading ---

TEST(SafetensorsRead, ReferenceFileOfTheOfficialPackageIsReadExactly) {
  const SafetensorsFile file(std::string(HEDDLE_SOURCE_DIR) + "/tests/data/reference.safetensors");

  const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"ключ", "значение"}};
  EXPECT_EQ(file.metadata(), metadata);
  EXPECT_EQ(file.names().size(), 12u);
  const auto f64 = file.read("f64");
  EXPECT_EQ(f64.shape(), (Shape{1, 3}));
  EXPECT_EQ(f64.to_vector<double>(), (std::vector<double>{1.0 / 3, -2.5e300, std::numeric_limits<double>::infinity()}));
  std::vector<std::uint32_t> f32_bits;
  for (float value : file.read("f32").to_vector<float>()) f32_bits.push_back(std::bit_cast<std::uint32_t>(value));
  EXPECT_EQ(f32_bits,
            (std::vector<std::uint32_t>{0x3DCCCCCD, 0xBFC00000, 0x7F61B1E6, 0x7FC00000, 0x80000000, 0x00000001}));
  EXPECT_EQ(file.read("bf16").to_doubles(), (std::vector<double>{1.0, -2.0, 3.140625, 0.0078125}));
  EXPECT_EQ(file.read("f16").to_doubles(), (std::vector<double>{65504.0, -0.5, 0x1p-24}));
  EXPECT_EQ(file.read("i64").to_vector<std::int64_t>(),
            (std::vector<std::int64_t>{std::numeric_limits<std::int64_t>::min(), 0, std::numeric_limits<std::int64_t>::max()}));
  const auto i32 = file.read("i32");
  EXPECT_EQ(i32.shape(), (Shape{2, 1}));
  EXPECT_EQ(i32.to_vector<std::int32_t>(),
            (std::vector<std::int32_t>{std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max()}));
  EXPECT_EQ(file.read("u8").to_vector<std::uint8_t>(), (std::vector<std::uint8_t>{0, 1, 255}));
  EXPECT_EQ(file.read("bool").to_vector<bool>(), (std::vector<bool>{true, false, false, true, true, true}));
  EXPECT_EQ(file.read("scalar").shape(), Shape{});
  EXPECT_EQ(file.read("scalar").item(), 42.5);
  EXPECT_EQ(file.read("empty").shape(), (Shape{3, 0, 2}));
  EXPECT_EQ(file.read("вес \"q\"\n").to_vector<std::int64_t>(), std::vector<std::int64_t>{7});
}

// The error of reading tensor `name` of a file of these bytes.
std::string read_error(const std::string& bytes, const std::string& name) {
  const TempFolder folder;
  write_raw(folder / "f", bytes);
  const SafetensorsFile file(folder / "f");
  try {
    file.read(name);
    return "";
  } catch (const Error& error) {
    const std::string text = error.what();
    return text.substr(text.find("/f") + 2);
  }
}

TEST(SafetensorsRead, DtypesHeddleLacksAreListedAndRefusedOnlyWhenRead) {
  const std::string bytes = file_bytes(
      R"({"a":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"Q9","shape":[5],"data_offsets":[2,3]},)"
      R"("c":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}})",
      "1234");

  const std::string end = "; heddle reads F64, F32, BF16, F16, I64, I32, U8 and BOOL";
  EXPECT_EQ(read_error(bytes, "a"), ": tensor 'a' has dtype F8_E4M3" + end);
  EXPECT_EQ(read_error(bytes, "b"), ": tensor 'b' has dtype Q9" + end);
  EXPECT_EQ(read_error(bytes, "c"), "");
}

TEST(SafetensorsRead, BoolBytesOtherThanZeroAndOneAreRefused) {
  const std::string bytes =
      file_bytes(R"({"a":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})", std::string("\0\1\7", 3));

  EXPECT_EQ(read_error(bytes, "a"), ": tensor 'a' of dtype BOOL holds byte 7 at element 2; only 0 and 1 are legal");
}

TEST(SafetensorsRead, MissingTensorIsNamed) {
  EXPECT_EQ(read_error(file_bytes("{\"a\":" + kOne + "}", "1"), "w"), " has no tensor 'w' among its 1 tensors");
}

TEST(SafetensorsRead, FileCutWhileOpenIsAnError) {
  const TempFolder folder;
  const auto path = folder / "f";
  write_raw(path, file_bytes("{\"a\":" + kOne + "}", "1"));
  const SafetensorsFile file(path);

  std::filesystem::resize_file(path, 20);

  EXPECT_THROW(file.read("a"), Error);
}

TEST(SafetensorsRead, PathsAreRawBytes) {
  const TempFolder folder;
  for (const char* name : {"Загрузки ö", "with space", "byte \xFF", "line\n"}) {
    const auto path = folder / name;

    write_safetensors(path, {{"x", Tensor::full({2}, 3.0)}});

    EXPECT_EQ(SafetensorsFile(path).read("x").to_vector<float>(), (std::vector<float>{3, 3})) << printable_path(path);
  }
}

TEST(SafetensorsRead, PathsOfBadFilesArePrintedEscaped) {
  const TempFolder folder;
  try {
    SafetensorsFile file(folder / "ö \xFF\n");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()),
              "cannot open " + folder.path().native() + "/ö \\xFF\\x0A: No such file or directory");
  }
}

TEST(SafetensorsRead, FoldersAndPipesAreRefused) {
  const TempFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);

  EXPECT_THROW(SafetensorsFile{folder.path()}, Error);
  EXPECT_THROW(SafetensorsFile{folder / "pipe"}, Error);
}

// --- Writing ---

TEST(SafetensorsWrite, EmptyMapHasTheBytesOfTheReferenceImplementation) {
  const TempFolder folder;

  write_safetensors(folder / "f", {});

  EXPECT_EQ(read_file(folder / "f"), std::string("\x08\0\0\0\0\0\0\0{}      ", 16));
}

TEST(SafetensorsWrite, HeaderIsOrderedByElementSizeThenNameAndPadded) {
  const TempFolder folder;

  write_safetensors(folder / "f",
                    {{"z", Tensor::from_vector<std::uint8_t>({7}, {1})},
                     {"b", Tensor::from_vector<float>({1.0f}, {})},
                     {"a", Tensor::from_vector<float>({2.0f}, {1, 1})},
                     {"q\"\n", Tensor::empty({0, 2}, DType::i64)}},
                    {{"format", "pt"}});

  const std::string header =
      R"({"__metadata__":{"format":"pt"},"q\"\n":{"dtype":"I64","shape":[0,2],"data_offsets":[0,0]},)"
      R"("a":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[],"data_offsets":[4,8]},)"
      R"("z":{"dtype":"U8","shape":[1],"data_offsets":[8,9]}})";
  const std::string padding((8 - header.size() % 8) % 8, ' ');
  EXPECT_EQ(read_file(folder / "f"), file_bytes(header + padding, std::string("\0\0\0\x40\0\0\x80\x3F\7", 9)));
}

template <typename T>
void expect_round_trip(const std::vector<T>& values) {
  const TempFolder folder;
  const auto n = static_cast<std::int64_t>(values.size());
  const Tensor tensor = Tensor::from_vector<T>(values, {1, n});

  write_safetensors(folder / "f", {{"x", tensor}});
  const Tensor back = SafetensorsFile(folder / "f").read("x");

  EXPECT_EQ(back.dtype(), tensor.dtype());
  EXPECT_EQ(back.shape(), tensor.shape());
  EXPECT_EQ(std::memcmp(back.view().data, tensor.view().data, static_cast<std::size_t>(tensor.nbytes())), 0)
      << tensor.dtype();
}

TEST(SafetensorsWrite, EveryDtypeRoundTripsBitForBit) {
  expect_round_trip<double>({1.0 / 3, -0.0, std::nan("7")});
  expect_round_trip<float>({0.1f, -INFINITY, std::nanf("5"), 1e-45f});
  expect_round_trip<bfloat16>({bfloat16(1.5f), bfloat16(-3e38f)});
  expect_round_trip<float16>({float16(65504.0f), float16(1e-7f)});
  expect_round_trip<std::int64_t>({std::numeric_limits<std::int64_t>::min(), 5});
  expect_round_trip<std::int32_t>({-7, 1 << 30, 0});
  expect_round_trip<std::uint8_t>({0, 128, 255});
  expect_round_trip<bool>({true, false, true});
}

TEST(SafetensorsWrite, StridedTensorsAreWrittenDense) {
  const TempFolder folder;
  const Tensor base = Tensor::from_vector<float>({0, 1, 2, 3, 4, 5, 6, 7}, {2, 4});

  // Columns 1 to 3 of base, transposed; and row 1 repeated.
  write_safetensors(folder / "f", {{"t", base.alias({3, 2}, {1, 4}, 1)}, {"e", base.alias({2, 4}, {0, 1}, 4)}});

  const SafetensorsFile file(folder / "f");
  EXPECT_EQ(file.read("t").to_vector<float>(), (std::vector<float>{1, 5, 2, 6, 3, 7}));
  EXPECT_EQ(file.read("e").to_vector<float>(), (std::vector<float>{4, 5, 6, 7, 4, 5, 6, 7}));
}

TEST(SafetensorsWrite, ScalarAndOneElementTensorStayDifferent) {
  const TempFolder folder;

  write_safetensors(folder / "f", {{"s", Tensor::scalar(2.0)}, {"v", Tensor::full({1}, 2.0)}, {"o", Tensor::empty({0})}});

  const SafetensorsFile file(folder / "f");
  EXPECT_EQ(file.read("s").shape(), Shape{});
  EXPECT_EQ(file.read("v").shape(), Shape{1});
  EXPECT_EQ(file.read("o").shape(), Shape{0});
}

TEST(SafetensorsWrite, SavingOverTheFileThatWasReadKeepsItsTensors) {
  const TempFolder folder;
  const auto path = folder / "f";
  write_safetensors(path, {{"x", Tensor::full({3}, 1.0)}, {"y", Tensor::full({3}, 2.0)}});
  const SafetensorsFile file(path);
  const Tensor x = file.read("x");

  write_safetensors(path, {{"x", x}}, {{"changed", "yes"}});

  EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{1, 1, 1}));
  EXPECT_EQ(file.read("y").to_vector<float>(), (std::vector<float>{2, 2, 2}));
  EXPECT_EQ(SafetensorsFile(path).read("x").to_vector<float>(), (std::vector<float>{1, 1, 1}));
}

TEST(SafetensorsWrite, FilesOpenInTheOfficialReader) {
  if (std::system("python3 -c 'import safetensors' 2>/dev/null") != 0)
    GTEST_SKIP() << "python3 with the safetensors package is not installed here";
  const TempFolder folder;
  write_safetensors(folder / "f",
                    {{"u", Tensor::from_vector<std::uint8_t>({7, 8, 9}, {3})},
                     {"ö", Tensor::from_vector<bfloat16>({bfloat16(1.0f)}, {})},
                     {"z", Tensor::empty({0, 2}, DType::f64)},
                     {"t", Tensor::from_vector<std::int32_t>({1, 2, 3, 4}, {2, 2}).alias({2, 2}, {1, 2}, 0)}},
                    {{"format", "pt"}});
  write_raw(folder / "read.py", R"(import sys, safetensors
tensors = dict(safetensors.deserialize(open(sys.argv[1], "rb").read()))
found = {name: (t["dtype"], list(t["shape"]), bytes(t["data"]).hex()) for name, t in tensors.items()}
assert found == {
    "u": ("U8", [3], "070809"),
    "ö": ("BF16", [], "803f"),
    "z": ("F64", [0, 2], ""),
    "t": ("I32", [2, 2], "01000000030000000200000004000000"),
}, found
)");

  const std::string command = "python3 " + (folder / "read.py").native() + " " + (folder / "f").native();

  EXPECT_EQ(std::system(command.c_str()), 0);
}

// The error of writing these tensors; the target must not have appeared, nor anything beside it.
std::string write_error(const std::vector<std::pair<std::string, Tensor>>& tensors,
                        const std::map<std::string, std::string>& metadata = {}) {
  const TempFolder folder;
  try {
    write_safetensors(folder / "f", tensors, metadata);
    return "";
  } catch (const Error& error) {
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    const std::string text = error.what();
    return text.substr(text.find("/f") + 2);
  }
}

TEST(SafetensorsWrite, BadInputIsRefusedBeforeAnythingIsWritten) {
  const Tensor x = Tensor::zeros({2});
  EXPECT_EQ(write_error({{"x", x}, {"y", x}, {"x", Tensor::zeros({1}, DType::f64)}}), ": tensor 'x' is given twice");
  EXPECT_EQ(write_error({{"__metadata__", x}}), ": tensor '__metadata__' has a reserved name");
  EXPECT_EQ(write_error({{"x", Tensor()}}), ": tensor 'x' is undefined");
  EXPECT_EQ(write_error({{"x\xFF", x}}), ": tensor 'x\\xFF' is not valid UTF-8");
  EXPECT_EQ(write_error({}, {{"path", "\xFF"}}), ": metadata 'path' is not valid UTF-8");
}

TEST(SafetensorsWrite, HeaderAboveTheLimitIsRefused) {
  const std::string error = write_error({{std::string(100'000'001, 'n'), Tensor::zeros({1})}});

  EXPECT_EQ(error,
            ": the header takes 100000056 bytes, above the limit of 100000000; write fewer tensors to a file");
}

}  // namespace
}  // namespace heddle::nn
