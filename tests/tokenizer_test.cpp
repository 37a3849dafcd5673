#include "nn/tokenizer.h"

#include <gtest/gtest.h>

#include "kernels/runtime/check.h"

namespace heddle::nn {
namespace {

TEST(ByteTokenizer, IdsAreByteValues) {
  const std::vector<std::int32_t> expected{65, 10, 195, 164, 0, 255};

  EXPECT_EQ(ByteTokenizer().encode(std::string("A\n\xC3\xA4\0\xFF", 6)), expected);
}

TEST(ByteTokenizer, EveryByteSurvivesARoundTrip) {
  std::string text;
  for (int byte = 255; byte >= 0; --byte) text.push_back(static_cast<char>(byte));

  EXPECT_EQ(ByteTokenizer().decode(ByteTokenizer().encode(text)), text);
}

TEST(ByteTokenizer, IdOutsideTheVocabularyIsNamed) {
  const std::vector<std::int32_t> ids{72, 256};

  try {
    ByteTokenizer().decode(ids);
    FAIL() << "decoded an id that is not a byte";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "tokenizer: id 256 at position 1 is not a byte; ids are 0 to 255");
  }
}

}  // namespace
}  // namespace heddle::nn
