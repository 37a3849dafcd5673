// Numbers worked out on paper, run with several tile sizes. Tolerance: half a unit of the last printed digit.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "tests/support/attention_run.h"

namespace heddle::test {
namespace {

constexpr double kHalfDigit = 0.5e-4;
constexpr AttentionTile kTiles[] = {{1, 1}, {1, 2}, {2, 3}, {3, 4}, {1, 5}, {4, 6}, {64, 64}};

void expect_values(const std::vector<double>& got, const std::vector<double>& expected, double tolerance = kHalfDigit) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], tolerance) << "index " << i;
}

std::vector<double> identity(std::int64_t n) {
  std::vector<double> values(n * n);
  for (std::int64_t i = 0; i < n; ++i) values[i * n + i] = 1.0;
  return values;
}

// Rows of `width` values written into the first columns of rows of D.
std::vector<double> widened(const std::vector<double>& rows, std::int64_t width, std::int64_t D) {
  std::vector<double> values(rows.size() / width * D);
  for (std::size_t i = 0; i < rows.size(); ++i) values[i / width * D + i % width] = rows[i];
  return values;
}

// The attention weights of each row: the output with the identity as values.
template <typename E>
std::vector<double> weights(const std::vector<double>& q, const std::vector<double>& k, std::int64_t width, bool is_causal,
                            AttentionTile tile) {
  const auto Sq = static_cast<std::int64_t>(q.size()) / width, Sk = static_cast<std::int64_t>(k.size()) / width;
  const AttentionSizes sizes{.Sq = Sq, .Sk = Sk, .D = std::max(Sk, width), .is_causal = is_causal};
  std::vector<double> out = run_attention<E>(sizes, {widened(q, width, sizes.D), widened(k, width, sizes.D),
                                                     widened(identity(Sk), Sk, sizes.D), {}, {}}, {.tile = tile}).out;
  std::vector<double> values(Sq * Sk);
  for (std::int64_t i = 0; i < Sq * Sk; ++i) values[i] = out[i / Sk * sizes.D + i % Sk];
  return values;
}

const std::vector<double> kLogits = {1, 2, 3, 6, 2, 1};

TEST(AttentionByHand, SoftmaxOfSixLogits) {
  for (AttentionTile tile : kTiles)
    expect_values(weights<double>({1}, kLogits, 1, false, tile), {0.0061, 0.0167, 0.0453, 0.9092, 0.0167, 0.0061});
}

// Key i is [logit i, 0], value i is [i, i], the query [1, 0].
AttentionResults first_keys(std::int64_t count, AttentionTile tile) {
  std::vector<double> k(2 * count), v(2 * count);
  for (std::int64_t i = 0; i < count; ++i) k[2 * i] = kLogits[i], v[2 * i] = v[2 * i + 1] = static_cast<double>(i + 1);
  return run_attention<float>({.Sk = count, .D = 2}, {{1, 0}, k, v, {}, {}}, {.tile = tile});
}

TEST(AttentionByHand, OnlineStateAfterEachTileOfThree) {
  // After one tile m = 3, after two m = 6; d = exp(lse - m), and the unnormalised output is d times the output.
  const AttentionResults one = first_keys(3, {1, 3}), two = first_keys(6, {1, 3});
  const double d_one = std::exp(one.lse[0] - 3), d_two = std::exp(two.lse[0] - 6);

  EXPECT_NEAR(d_one, 1.5032, kHalfDigit);
  EXPECT_NEAR(d_two, 1.0999, kHalfDigit);
  expect_values({d_one * one.out[0], d_one * one.out[1]}, {3.8711, 3.8711});
  // 3.8711 exp(-3) + 4 + 5 exp(-4) + 6 exp(-5)
  expect_values({d_two * two.out[0], d_two * two.out[1]}, {4.3247, 4.3247});
}

TEST(AttentionByHand, OutputAndLseOfSixKeysForEveryTileSize) {
  for (std::int64_t key = 1; key <= 6; ++key) {
    const AttentionResults r = first_keys(6, {1, key});
    expect_values(r.out, {3.9320, 3.9320});
    expect_values(r.lse, {6.0952});
  }
}

// Tokens [1,0], [0,1], [1,1] with W_q = I, W_k = [[1,1],[0,1]], W_v = 2I.
const std::vector<double> kCacheKeys = {1, 1, 0, 1, 1, 2}, kCacheValues = {2, 0, 0, 2, 2, 2};

TEST(AttentionByHand, NewTokenAgainstCachedKeys) {
  for (AttentionTile tile : kTiles)
    expect_values(run_attention<float>({.Sk = 3, .D = 2, .is_causal = true}, {{1, 1}, kCacheKeys, kCacheValues, {}, {}},
                                       {.tile = tile}).out, {1.8199, 1.5105});
}

TEST(AttentionByHand, CacheChangesNoBit) {
  for (AttentionTile tile : kTiles) {
    const AttentionInputs cached{{1, 1}, kCacheKeys, kCacheValues, {}, {}};
    const AttentionInputs whole{{1, 0, 0, 1, 1, 1}, kCacheKeys, kCacheValues, {}, {}};

    const auto with = run_attention<float>({.Sk = 3, .D = 2, .is_causal = true}, cached, {.tile = tile}).out;
    const auto without = run_attention<float>({.Sq = 3, .Sk = 3, .D = 2, .is_causal = true}, whole, {.tile = tile}).out;

    EXPECT_EQ(with, std::vector<double>(without.begin() + 4, without.end()));
  }
}

TEST(AttentionByHand, FiveTokensOfAPagedSequenceInOrder) {
  const std::vector<double> q = {1, 2}, k = {1, 0, 0, 1, 1, 1, 2, 0, 0, 2}, v = {1, 1, 2, 2, 3, 3, 4, 4, 5, 5};
  for (AttentionTile tile : kTiles) {
    expect_values(weights<float>(q, k, 2, false, tile), {0.0295, 0.0802, 0.2179, 0.0802, 0.5923});
    expect_values(run_attention<float>({.Sk = 5, .D = 2}, {q, k, v, {}, {}}, {.tile = tile}).out, {4.1256, 4.1256});
  }
}

TEST(AttentionByHand, DecodeWithHistoryGivesFutureKeyWeightZero) {
  // W_q = [[1,1],[0,1]]: tokens [1,0], [1,1] of user A ask [1,1], [1,2]; [0,1], [2,0] of user B ask [0,1], [2,2].
  for (AttentionTile tile : kTiles) {
    const auto a = weights<float>({1, 1, 1, 2}, {1, 0, 1, 1, 0, 1, 1, 0, 1, 1}, 2, true, tile);
    const auto b = weights<float>({0, 1, 2, 2}, {0, 1, 2, 0, 1, 1, 0, 1, 2, 0}, 2, true, tile);

    expect_values(a, {0.1749, 0.4754, 0.1749, 0.1749, 0, 0.0513, 0.3790, 0.1394, 0.0513, 0.3790});
    expect_values(b, {0.2969, 0.1092, 0.2969, 0.2969, 0, 0.0414, 0.3057, 0.3057, 0.0414, 0.3057});
    EXPECT_EQ(a[4], 0.0);
    EXPECT_EQ(b[4], 0.0);
  }
}

TEST(AttentionByHand, LargeLogitDoesNotOverflowFloat16) {
  for (AttentionTile tile : kTiles) {
    const auto p = weights<float16>({1}, {2, 4, 12}, 1, false, tile);
    EXPECT_NEAR(p[0], 0.000045, 0.5e-6);
    EXPECT_NEAR(p[1], 0.000335, 0.5e-6);
    EXPECT_NEAR(p[2], 0.99962, 0x1p-12);  // float16 steps by 2^-11 below 1
  }
}

TEST(AttentionByHand, ScoreOverFloat16RangeIsKeptInFloat) {
  // 64 * 100 * 100 / 8 = 80000 exceeds 65504; the second key scores 800 less.
  std::vector<double> q(64, 100.0), k(64, 100.0), v(64, 1.0);
  k.insert(k.end(), 64, 99.0);
  v.insert(v.end(), 64, 2.0);
  for (AttentionTile tile : kTiles)
    EXPECT_EQ(run_attention<float16>({.Sk = 2, .D = 64, .scale = 0.125}, {q, k, v, {}, {}}, {.tile = tile}).out,
              std::vector<double>(64, 1.0));
}

TEST(AttentionByHand, CausalMaskIsAlignedAtTheBottomRight) {
  // With q = 0 every visible key weighs the same: row 0 sees 4 of 5 keys, row 1 all.
  for (AttentionTile tile : kTiles) {
    const AttentionResults r = run_attention<float>({.Sq = 2, .Sk = 5, .is_causal = true},
                                                    {{0, 0}, {1, 2, 3, 4, 5}, {1, 2, 3, 4, 5}, {}, {}}, {.tile = tile});
    expect_values(r.out, {2.5, 3.0});
    expect_values(r.lse, {std::log(4.0), std::log(5.0)});
  }
}

TEST(AttentionByHand, QueryHeadReadsKeyHeadOfItsGroup) {
  for (AttentionTile tile : kTiles)
    EXPECT_EQ(run_attention<float>({.Hq = 4, .Hkv = 2}, {{1, 1, 1, 1}, {1, 1}, {0, 1}, {}, {}}, {.tile = tile}).out,
              (std::vector<double>{0, 0, 1, 1}));
}

TEST(AttentionByHand, CausalVisitsHalfTheTilesAndMasksTheDiagonal) {
  const AttentionTile tile{64, 32};
  const AttentionMask mask{4096, 4096, /*is_causal=*/true};
  std::int64_t visited = 0, masked = 0;
  for (std::int64_t i = 0; i < tile_count(4096, tile.query); ++i) {
    const Span queries = tile_span(i, tile.query, 4096), tiles = visited_key_tiles(mask, tile, queries);
    visited += tiles.size();
    for (std::int64_t j = tiles.begin; j < tiles.end; ++j) {
      const Span keys = tile_span(j, tile.key, 4096);
      masked += local_keys(mask, queries.begin, keys).size() < keys.size();  // the first row sees the fewest
    }
  }
  std::int64_t visited_by_keys = 0;
  for (std::int64_t j = 0; j < tile_count(4096, tile.key); ++j)
    visited_by_keys += visited_query_tiles(mask, tile, tile_span(j, tile.key, 4096)).size();

  EXPECT_EQ(tile_count(4096, tile.query) * tile_count(4096, tile.key), 8192);
  EXPECT_EQ(visited, 4160);
  EXPECT_EQ(visited_by_keys, 4160);
  EXPECT_EQ(masked, 128);
}

}  // namespace
}  // namespace heddle::test
