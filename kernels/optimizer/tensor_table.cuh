#pragma once

#include <cstdint>
#include <span>

#include "kernels/runtime/launch.cuh"

// Note: Tensor tables
// One launch works on up to kTableItems tensors: a table of their pointers travels as the kernel's argument, so nothing is copied
// to the device first and the launch can be captured. A block takes kTableChunk elements of one tensor.

namespace heddle::cuda {

inline constexpr int kTableItems = 48;  // of up to 72 bytes: arguments of a kernel hold 4 KB
inline constexpr std::int64_t kTableChunk = 4096;

// Item: whatever a kernel needs of a tensor, `count` elements long.
template <typename Item>
struct TensorTable {
  Item items[kTableItems];
  int ends[kTableItems];  // the blocks of items up to and including this one
  int size = 0;

  int blocks() const { return size == 0 ? 0 : ends[size - 1]; }
};

// The part of a table that this block works on: elements [begin, end) of item `index`.
struct TablePart {
  int index;
  std::int64_t begin, end;
};

template <typename Item>
__device__ TablePart table_part(const TensorTable<Item>& table) {
  int index = 0;
  while (static_cast<int>(blockIdx.x) >= table.ends[index]) ++index;
  const std::int64_t begin = (blockIdx.x - (index == 0 ? 0 : table.ends[index - 1])) * kTableChunk;
  const std::int64_t count = table.items[index].count;
  return {index, begin, begin + kTableChunk < count ? begin + kTableChunk : count};
}

// Calls launch(table) for as many tables as the items fill. Empty tensors are left out.
template <typename Item, typename Launch>
void for_each_table(std::span<const Item> items, const Launch& launch) {
  constexpr std::int64_t kMostBlocks = std::int64_t{1} << 30;
  TensorTable<Item> table;
  const auto flush = [&] {
    if (table.size > 0) launch(table);
    table.size = 0;
  };
  for (const Item& item : items) {
    const std::int64_t blocks = (item.count + kTableChunk - 1) / kTableChunk;
    if (blocks == 0) continue;
    if (table.size == kTableItems || table.blocks() + blocks > kMostBlocks) flush();
    const int before = table.blocks();
    table.items[table.size] = item;
    table.ends[table.size++] = before + static_cast<int>(blocks);
  }
  flush();
}

}  // namespace heddle::cuda
