#pragma once

#include <algorithm>
#include <cstdint>

namespace heddle {

// How many query rows and keys one step of a tiled attention kernel handles together.
struct AttentionTile {
  std::int64_t query = 0;
  std::int64_t key = 0;
};

// Half-open range of rows, keys or tiles.
struct Span {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  constexpr std::int64_t size() const { return end - begin; }
  friend bool operator==(const Span&, const Span&) = default;
};

// Note: Visible ranges
// Every mask here lets a query row see a prefix of the keys, and the prefix never shrinks from one row to the next; so a
// key is seen by a suffix of the rows. Kernels loop over these ranges instead of masking scores: what is outside is
// never read, so no value there can matter.
struct AttentionMask {
  std::int64_t Sq = 0;
  std::int64_t Sk = 0;
  bool is_causal = false;

  // Row `row` sees the keys [0, visible_keys(row)).
  constexpr std::int64_t visible_keys(std::int64_t row) const {
    return is_causal ? std::clamp<std::int64_t>(row + 1 + Sk - Sq, 0, Sk) : Sk;
  }
  // Key `key` is seen by the rows [first_query(key), Sq).
  constexpr std::int64_t first_query(std::int64_t key) const {
    return is_causal ? std::clamp<std::int64_t>(key + Sq - Sk, 0, Sq) : 0;
  }
};

// Number of tiles, the last possibly ragged, and the range that tile `index` covers.
constexpr std::int64_t tile_count(std::int64_t length, std::int64_t tile) { return (length + tile - 1) / tile; }
constexpr Span tile_span(std::int64_t index, std::int64_t tile, std::int64_t length) {
  return {index * tile, std::min((index + 1) * tile, length)};
}

// The key tiles that a tile of query rows visits, and the query tiles that a tile of keys visits: those with at least one
// visible pair.
constexpr Span visited_key_tiles(const AttentionMask& mask, AttentionTile tile, Span queries) {
  return {0, tile_count(mask.visible_keys(queries.end - 1), tile.key)};
}
constexpr Span visited_query_tiles(const AttentionMask& mask, AttentionTile tile, Span keys) {
  return {mask.first_query(keys.begin) / tile.query, tile_count(mask.Sq, tile.query)};
}

// The keys of a tile that a row sees, and the rows of a tile that see a key, counted from the start of the tile.
constexpr Span local_keys(const AttentionMask& mask, std::int64_t row, Span keys) {
  return {0, std::clamp<std::int64_t>(mask.visible_keys(row) - keys.begin, 0, keys.size())};
}
constexpr Span local_queries(const AttentionMask& mask, std::int64_t key, Span queries) {
  return {std::clamp<std::int64_t>(mask.first_query(key) - queries.begin, 0, queries.size()), queries.size()};
}

}  // namespace heddle
