#include "nn/data.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <numeric>
#include <set>

#include "nn/arithmetic_data.h"
#include "nn/permutation.h"
#include "nn/text_data.h"
#include "tests/support/error_of.h"

namespace heddle::nn {
namespace {

using test::error_of;

namespace fs = std::filesystem;
using Ids = std::vector<std::int64_t>;

// Tokens 0, 1, 2, ...: a window shows where it was cut.
TextCorpus counted(std::int64_t count) {
  TextCorpus corpus{"test", std::vector<std::int32_t>(static_cast<std::size_t>(count))};
  std::iota(corpus.tokens.begin(), corpus.tokens.end(), 0);
  return corpus;
}

Ids ids_of(const Batch& batch) { return batch.input_ids.to_vector<std::int64_t>(); }
Ids labels_of(const Batch& batch) { return batch.labels.to_vector<std::int64_t>(); }

// First token of each of the training examples first .. first+count-1.
Ids train_starts(const Dataset& data, std::int64_t first, std::int64_t count) {
  const Ids ids = ids_of(data.train_batch(first, count));
  Ids starts;
  for (std::int64_t row = 0; row < count; ++row) starts.push_back(ids[static_cast<std::size_t>(row * data.row_length())]);
  return starts;
}

class TextFiles : public testing::Test {
 protected:
  TextFiles() : root_(fs::temp_directory_path() / ("heddle_data_test_" + std::to_string(getpid()))) { fs::create_directories(root_); }
  ~TextFiles() override { fs::remove_all(root_); }

  void write(const std::string& name, const std::string& text) const {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name, std::ios::binary) << text;
  }
  std::vector<std::string> found(const std::vector<std::string>& patterns) const {
    std::vector<std::string> names;
    for (const fs::path& path : find_files(patterns, root_)) names.push_back(path.lexically_relative(root_).string());
    return names;
  }

  fs::path root_;
};

TEST(Permutation, EverySizeIsVisitedExactlyOnce) {
  for (const std::int64_t size : {1, 2, 3, 20, 64, 65, 1000}) {
    const Permutation order(size, /*seed=*/7, /*stream=*/3);
    std::set<std::int64_t> seen;
    for (std::int64_t i = 0; i < size; ++i) seen.insert(order[i]);

    EXPECT_EQ(static_cast<std::int64_t>(seen.size()), size);
    EXPECT_EQ(*seen.begin(), 0);
    EXPECT_EQ(*seen.rbegin(), size - 1);
  }
}

TEST(Permutation, LargeSizeStaysInRange) {
  const std::int64_t size = std::int64_t{1'000'000'000'000'000'000};
  const Permutation order(size, /*seed=*/7, /*stream=*/3);

  for (std::int64_t i = 0; i < 1000; ++i) {
    EXPECT_GE(order[size - 1 - i], 0);
    EXPECT_LT(order[size - 1 - i], size);
  }
}

// Position 0 of 4000 streams over 10 values: each value is expected 400 times with a standard deviation of
// sqrt(4000 * 0.1 * 0.9) = 19. Five deviations are passed by chance in fewer than 1 of 100 000 seeds.
TEST(Permutation, EveryValueIsEquallyLikelyAtAPosition) {
  std::vector<int> counts(10);
  for (std::uint64_t stream = 0; stream < 4000; ++stream) ++counts[static_cast<std::size_t>(Permutation(10, 5, stream)[0])];

  EXPECT_GE(*std::ranges::min_element(counts), 400 - 5 * 19);
  EXPECT_LE(*std::ranges::max_element(counts), 400 + 5 * 19);
}

TEST(TextData, LabelsAreTheNextTokens) {
  const TextData data(counted(1000), /*sequence_length=*/7, /*validation_fraction=*/0.1, /*seed=*/1);
  const Batch batch = data.train_batch(0, 5);

  EXPECT_EQ(batch.input_ids.shape(), (Shape{5, 7}));
  EXPECT_EQ(batch.labels.shape(), (Shape{5, 7}));
  Ids next = ids_of(batch);
  for (std::int64_t& id : next) ++id;
  EXPECT_EQ(labels_of(batch), next);
}

TEST(TextData, NoTrainingWindowTouchesAHeldOutToken) {
  const TextData data(counted(1003), /*sequence_length=*/7, /*validation_fraction=*/0.1, /*seed=*/1);
  std::set<std::int64_t> held_out;
  for (const Batch& batch = data.eval_batch(0, data.eval_size()); const Ids& ids : {ids_of(batch), labels_of(batch)})
    held_out.insert(ids.begin(), ids.end());

  EXPECT_EQ(static_cast<std::int64_t>(held_out.size()), data.eval_size() * 8);
  for (const std::int64_t start : train_starts(data, 0, data.train_size()))
    for (std::int64_t token = start; token <= start + 7; ++token) EXPECT_FALSE(held_out.contains(token)) << token;
}

TEST(TextData, EveryOtherTokenIsTrainedOn) {
  const TextData data(counted(1003), /*sequence_length=*/7, /*validation_fraction=*/0.1, /*seed=*/1);
  std::set<std::int64_t> trained;
  for (const std::int64_t start : train_starts(data, 0, data.train_size()))
    for (std::int64_t token = start; token <= start + 7; ++token) trained.insert(token);

  EXPECT_EQ(static_cast<std::int64_t>(trained.size()), 1003 - data.eval_size() * 8);
  EXPECT_EQ(*trained.rbegin(), 1002);
}

// 125 windows of 8 tokens; a tenth is 12.5, rounded to 13; the middle of the i-th of 13 equal parts of 125 windows.
TEST(TextData, HeldOutWindowsAreSpreadOverTheText) {
  const TextData data(counted(1000), /*sequence_length=*/7, /*validation_fraction=*/0.1, /*seed=*/1);
  Ids starts;
  for (std::int64_t i = 0; i < data.eval_size(); ++i) starts.push_back(data.start_of(Split::eval, i) / 8);

  EXPECT_EQ(starts, (Ids{4, 14, 24, 33, 43, 52, 62, 72, 81, 91, 100, 110, 120}));
}

TEST(TextData, HeldOutWindowsDoNotDependOnTheSeed) {
  const TextData a(counted(1000), 7, 0.1, /*seed=*/1), b(counted(1000), 7, 0.1, /*seed=*/2);

  EXPECT_EQ(ids_of(a.eval_batch(0, 13)), ids_of(b.eval_batch(0, 13)));
}

TEST(TextData, TextShorterThanTwoWindowsSaysWhatFits) {
  const auto make = [](std::int64_t length) { TextData(counted(501), length, /*validation_fraction=*/0.5, 1); };

  for (const std::int64_t length : {1024, 250})
    EXPECT_EQ(error_of([&] { make(length); }),
              concat_text("data.sequence_length: expected at most 249, for the 501 tokens of the text to give a training and a held-out "
                          "window, got ", length));
  EXPECT_EQ(error_of([&] { make(249); }), "no error");
}

TEST(TextData, TextWithoutAnyTwoWindowsIsRefused) {
  for (const std::int64_t size : {0, 3})
    EXPECT_EQ(error_of([&] { TextData(counted(size), /*sequence_length=*/1, 0.5, 1); }),
              concat_text("data.files: expected files of at least 4 bytes in all, got ", size));
  EXPECT_EQ(error_of([] { TextData(counted(4), /*sequence_length=*/1, 0.5, 1); }), "no error");
}

TEST(TextData, EmptyHeldOutSplitIsRefused) {
  const auto make = [] { TextData(counted(90), /*sequence_length=*/9, /*validation_fraction=*/0.05, 1); };

  EXPECT_EQ(error_of(make), "data.validation_fraction: expected a share that holds out at least one of the 9 windows of 10 "
                            "tokens, got 0.05");
}

TEST(TextData, EmptyTrainingSplitIsRefused) {
  const auto make = [] { TextData(counted(29), /*sequence_length=*/9, /*validation_fraction=*/0.9, 1); };

  EXPECT_EQ(error_of(make), "data.validation_fraction: expected a share that leaves at least one for training of the 2 "
                            "windows of 10 tokens, got 0.9");
}

TEST_F(TextFiles, PatternsFindSortedFilesOnce) {
  for (const char* name : {"b.h", "a/z.h", "a/deep/er/c.h", "a/c.cpp", "d.md"}) write(name, "x");

  EXPECT_EQ(found({"**/*.h", "a/*.cpp", "b.h"}), (std::vector<std::string>{"a/c.cpp", "a/deep/er/c.h", "a/z.h", "b.h"}));
}

TEST_F(TextFiles, HiddenFilesAndOutputFoldersAreSkipped) {
  for (const char* name : {".git/a.h", ".b.h", "build/c.h", "runs/tiny/d.h", "sub/build/e.h", "f.h"}) write(name, "x");

  EXPECT_EQ(found({"**/*.h"}), (std::vector<std::string>{"f.h"}));
}

TEST_F(TextFiles, OutputFolderNamedInAPatternIsRead) {
  write("build/c.h", "x");

  EXPECT_EQ(found({"build/*.h"}), (std::vector<std::string>{"build/c.h"}));
}

TEST_F(TextFiles, AbsolutePathIsRead) {
  write("a.txt", "x");

  EXPECT_EQ(found({(root_ / "a.txt").string()}), (std::vector<std::string>{"a.txt"}));
}

TEST_F(TextFiles, LinksThatLeadNowhereAreNoFiles) {
  write("a.h", "x");
  fs::create_symlink("loop.h", root_ / "loop.h");
  fs::create_symlink(".", root_ / "cycle");

  EXPECT_EQ(found({"**/*.h"}), (std::vector<std::string>{"a.h"}));
}

TEST_F(TextFiles, EveryPatternWithoutFilesIsNamed) {
  write("a.h", "x");

  EXPECT_EQ(error_of([&] { find_files({"*.h", "**/*.rs", "b.h"}, root_); }),
            "data.files: expected patterns that each match a file in " + root_.string() + ", got \"**/*.rs\", \"b.h\"");
}

TEST_F(TextFiles, BytesAreReadAsTheyAre) {
  write("a.bin", std::string("\xFF\0\r\n", 4));
  write("b.bin", "b");

  const TextCorpus corpus = read_text({"*.bin"}, root_);

  EXPECT_EQ(corpus.tokens, (std::vector<std::int32_t>{255, 0, 13, 10, 98}));
  EXPECT_EQ(corpus.origin, "2 files");
}

TEST_F(TextFiles, ConfigMakesTextData) {
  write("a.md", std::string(400, 'a'));
  const DataConfig config{.source = DataSource::text, .files = {"*.md"}, .sequence_length = 19, .validation_fraction = 0.1};

  const auto data = make_dataset(config, /*seed=*/1, root_);

  // 20 windows of 20 tokens, two held out: number 5 and number 15. Between and around them are 100, 180 and 80 tokens.
  EXPECT_EQ(data->describe(), "text: 1 file, 400 tokens with hash 1097d596a3fa9cc8, 2 held-out windows of 20 tokens, 303 places to start a "
                              "training window");
}

TEST_F(TextFiles, DescriptionsOfTextsOfOneLengthDiffer) {
  const DataConfig config{.source = DataSource::text, .files = {"a.md"}, .sequence_length = 19, .validation_fraction = 0.1};
  write("a.md", std::string(200, 'a') + std::string(200, 'b'));
  const std::string before = make_dataset(config, 1, root_)->describe();
  write("a.md", std::string(200, 'b') + std::string(200, 'a'));

  EXPECT_NE(make_dataset(config, 1, root_)->describe(), before);
}

TEST(Dataset, EpochsVisitEveryExampleInThreeDifferentOrders) {
  const TextData data(counted(60), /*sequence_length=*/9, /*validation_fraction=*/0.17, /*seed=*/3);
  const std::int64_t size = data.train_size();

  std::set<Ids> orders;
  std::set<std::set<std::int64_t>> visited;
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    const Ids starts = train_starts(data, epoch * size, size);
    orders.insert(starts);
    visited.insert({starts.begin(), starts.end()});
  }

  EXPECT_EQ(orders.size(), 3u);
  ASSERT_EQ(visited.size(), 1u);
  EXPECT_EQ(static_cast<std::int64_t>(visited.begin()->size()), size);
}

TEST(Dataset, PositionAloneDecidesABatch) {
  const TextData data(counted(60), /*sequence_length=*/9, /*validation_fraction=*/0.17, /*seed=*/3);
  const std::int64_t size = data.train_size();
  const Ids whole = train_starts(data, 0, 3 * size);

  const TextData resumed(counted(60), /*sequence_length=*/9, /*validation_fraction=*/0.17, /*seed=*/3);
  const Ids tail = train_starts(resumed, size - 2, 2 * size + 2);  // straddles two epoch ends

  EXPECT_TRUE(std::equal(tail.begin(), tail.end(), whole.begin() + size - 2, whole.end()));
}

TEST(Dataset, SeedsGiveDifferentOrders) {
  const TextData a(counted(500), 9, 0.1, /*seed=*/3), b(counted(500), 9, 0.1, /*seed=*/4);

  EXPECT_NE(train_starts(a, 0, 100), train_starts(b, 0, 100));
}

TEST(Dataset, LastEvaluationBatchIsShort) {
  const TextData data(counted(1000), /*sequence_length=*/7, /*validation_fraction=*/0.1, /*seed=*/1);

  EXPECT_EQ(data.eval_batch(10, 5).input_ids.shape(), (Shape{3, 7}));
  EXPECT_EQ(error_of([&] { data.eval_batch(13, 1); }), "eval_batch: first must be in [0, 13) and count >= 1, got 13 and 1");
}

DataConfig arithmetic(Operation operation, std::int64_t digits) {
  return {.source = DataSource::arithmetic, .operation = operation, .digits = digits, .sequence_length = 32, .validation_fraction = 0.1};
}

// The numbers of "aa+bb=ccc\n"; the answer is written last digit first.
struct Problem {
  std::int64_t a, b, answer;
  auto operator<=>(const Problem&) const = default;
};
Problem parsed(const std::string& text) {
  const std::size_t op = text.find_first_of("+-"), equals = text.find('=');
  const std::string answer(text.rbegin() + 1, text.rend() - static_cast<std::ptrdiff_t>(equals + 1));
  return {std::stoll(text.substr(0, op)), std::stoll(text.substr(op + 1, equals - op - 1)), std::stoll(answer)};
}

TEST(ArithmeticData, EveryProblemHasTheRightAnswer) {
  const ArithmeticData sums(arithmetic(Operation::addition, 2), /*seed=*/1);
  const ArithmeticData differences(arithmetic(Operation::subtraction, 2), /*seed=*/1);

  for (std::int64_t i = 0; i < sums.train_size(); ++i) {
    const Problem p = parsed(sums.problem(Split::train, i));
    ASSERT_EQ(p.answer, p.a + p.b);
  }
  for (std::int64_t i = 0; i < differences.train_size(); ++i) {
    const Problem p = parsed(differences.problem(Split::train, i));
    ASSERT_EQ(p.answer, p.a - p.b);
    ASSERT_GE(p.answer, 0);
  }
}

TEST(ArithmeticData, AnswerIsZeroPaddedAndReversed) {
  const ArithmeticData data(arithmetic(Operation::addition, 2), /*seed=*/1);
  std::set<std::string> problems;
  for (std::int64_t i = 0; i < data.train_size(); ++i) problems.insert(data.problem(Split::train, i));
  for (std::int64_t i = 0; i < data.eval_size(); ++i) problems.insert(data.problem(Split::eval, i));

  for (const char* problem : {"07+95=201\n", "95+07=201\n", "00+00=000\n", "12+34=640\n", "99+99=891\n"})
    EXPECT_TRUE(problems.contains(problem)) << problem;
}

TEST(ArithmeticData, SplitsAreDisjointAndCoverAllPairs) {
  const ArithmeticData data(arithmetic(Operation::addition, 2), /*seed=*/1);
  std::set<Problem> train, eval;
  for (std::int64_t i = 0; i < data.train_size(); ++i) train.insert(parsed(data.problem(Split::train, i)));
  for (std::int64_t i = 0; i < data.eval_size(); ++i) eval.insert(parsed(data.problem(Split::eval, i)));

  EXPECT_EQ(train.size() + eval.size(), 100u * 100u);
  for (const Problem& p : eval) {
    EXPECT_FALSE(train.contains(p));
    EXPECT_FALSE(train.contains({p.b, p.a, p.answer})) << "the mirror image of a held-out sum";
  }
}

TEST(ArithmeticData, SeedChoosesTheHeldOutPairs) {
  const ArithmeticData a(arithmetic(Operation::addition, 2), /*seed=*/1), b(arithmetic(Operation::addition, 2), /*seed=*/2);

  EXPECT_NE(ids_of(a.eval_batch(0, 50)), ids_of(b.eval_batch(0, 50)));
}

TEST(ArithmeticData, LossIsOnTheAnswerAndTheLineEndOnly) {
  const ArithmeticData data(arithmetic(Operation::subtraction, 1), /*seed=*/1);
  const std::string text = data.problem(Split::train, 3);  // "a-b=c\n"
  Ids ids, labels;
  for (std::int64_t i = 0; i < data.train_size(); ++i) {
    const Batch batch = data.train_batch(i, 1);
    if (ids_of(batch) == Ids{text[0], '-', text[2], '=', text[4]}) labels = labels_of(batch);
  }

  EXPECT_EQ(labels, (Ids{kNoLoss, kNoLoss, kNoLoss, text[4], '\n'}));
}

TEST(ArithmeticData, LongOperandsWork) {
  const ArithmeticData data(arithmetic(Operation::addition, 9), /*seed=*/1);
  const Problem p = parsed(data.problem(Split::train, data.train_size() - 1));

  EXPECT_EQ(p.answer, p.a + p.b);
  EXPECT_EQ(data.eval_size(), 2 * 10'000);
  EXPECT_EQ(data.train_batch(data.train_size() - 1, 2).input_ids.shape(), (Shape{2, 30}));
}

TEST(ArithmeticData, DescriptionGivesBothSizes) {
  EXPECT_EQ(ArithmeticData(arithmetic(Operation::addition, 2), 1).describe(),
            "arithmetic: addition of 2-digit numbers, 9090 training and 1010 held-out problems of 10 tokens");
}

TEST(ArithmeticData, ProblemLongerThanTheSequenceIsRefused) {
  DataConfig config = arithmetic(Operation::addition, 2);
  config.sequence_length = 8;

  EXPECT_EQ(error_of([&] { ArithmeticData(config, 1); }), "data: a problem of 2 digits takes 9 tokens; sequence_length is 8");
}

TEST(ArithmeticData, EmptyHeldOutSplitIsRefused) {
  DataConfig config = arithmetic(Operation::subtraction, 1);
  config.validation_fraction = 0.005;

  EXPECT_EQ(error_of([&] { ArithmeticData(config, 1); }),
            "data.validation_fraction: expected a share that holds out at least one of 55 pairs and leaves one, got 0.005");
}

TEST(MakeDataset, BadConfigIsAConfigError) {
  EXPECT_THROW(make_dataset({.validation_fraction = 1.5}, 1), ConfigError);
}

// Three rows of two positions over three ids. The right id wins everywhere, is beaten once, wins where it carries loss.
TEST(ExactMatch, CountsRowsWithEveryLabelRight) {
  const Tensor logits = Tensor::from_vector<float>({0, 1, 0, 2, 1, 0,    //
                                                    0, 1, 0, 1, 2, 0,    //
                                                    9, 1, 0, 2, 1, 0}, {3, 2, 3});
  const Tensor labels = Tensor::from_vector<std::int64_t>({1, 0, 1, 0, kNoLoss, 0}, {3, 2});

  EXPECT_EQ(count_exact_matches(logits, labels), 2);
}

TEST(ExactMatch, TiesGoToTheLowestId) {
  const Tensor logits = Tensor::from_vector<float>({1, 1, 1, 1}, {2, 1, 2});

  EXPECT_EQ(count_exact_matches(logits, Tensor::from_vector<std::int64_t>({0, 1}, {2, 1})), 1);
}

TEST(ExactMatch, NaNIsNeverRight) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Tensor logits = Tensor::from_vector<float>({nan, nan, nan, nan, 1, nan}, {2, 1, 3});

  EXPECT_EQ(count_exact_matches(logits, Tensor::from_vector<std::int64_t>({0, 1}, {2, 1})), 0);
}

}  // namespace
}  // namespace heddle::nn
