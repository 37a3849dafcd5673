#include "nn/safetensors.h"

#include <gtest/gtest.h>

#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/safetensors_bytes.h"
#include "tests/support/temp_folder.h"

namespace heddle::nn {
namespace {

using test::file_bytes;
using test::TempFolder;
using test::write_raw;

const std::string kOne = R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})";

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

// Of more than the 8 MiB that a thread reads at a time.
TEST(SafetensorsRead, LargeTensorsAreReadWholeOrNotAtAll) {
  const TempFolder folder;
  std::vector<std::int32_t> values(4'500'001);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::int32_t>(i * i);
  const std::int64_t count = std::ssize(values);
  write_safetensors(folder / "f", {{"t", Tensor::from_vector(values, {count})}});
  const SafetensorsFile file(folder / "f");
  const Tensor read = file.read("t");

  EXPECT_TRUE(std::equal(values.begin(), values.end(), read.view().as<std::int32_t>()));
  std::filesystem::resize_file(folder / "f", 4 * count);
  EXPECT_THROW(file.read("t"), Error);
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
