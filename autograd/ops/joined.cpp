#include "autograd/ops/joined.h"

#include <algorithm>

namespace heddle {
namespace {

bool share_storage(const std::vector<Tensor>& parts) {
  return std::ranges::all_of(parts, [&](const Tensor& part) {
    return part.defined() && part.storage() == parts[0].storage() && part.dtype() == parts[0].dtype() && part.rank() == parts[0].rank();
  });
}

// Whether each part starts `width(part)` elements after the one before it.
template <typename Width>
bool follow_each_other(const std::vector<Tensor>& parts, const Width& width) {
  for (std::size_t i = 1; i < parts.size(); ++i)
    if (parts[i].storage_offset() != parts[i - 1].storage_offset() + width(parts[i - 1])) return false;
  return true;
}

}  // namespace

Tensor joined_rows(const std::vector<Tensor>& parts) {
  if (!share_storage(parts)) return {};
  std::int64_t rows = 0;
  for (const Tensor& part : parts) {
    if (!part.is_contiguous() || (part.rank() == 2 && part.size(1) != parts[0].size(1))) return {};
    rows += part.size(0);
  }
  if (!follow_each_other(parts, [](const Tensor& part) { return part.numel(); })) return {};
  Shape shape = parts[0].shape();
  shape[0] = rows;
  return parts[0].alias(shape, contiguous_strides(shape), parts[0].storage_offset());
}

Tensor joined_columns(const std::vector<Tensor>& parts) {
  if (!share_storage(parts)) return {};
  std::int64_t columns = 0;
  for (const Tensor& part : parts) {
    if (part.size(0) != parts[0].size(0) || part.strides() != parts[0].strides() || part.strides()[1] != 1) return {};
    columns += part.size(1);
  }
  if (columns > parts[0].strides()[0] || !follow_each_other(parts, [](const Tensor& part) { return part.size(1); })) return {};
  return parts[0].alias({parts[0].size(0), columns}, parts[0].strides(), parts[0].storage_offset());
}

std::vector<Tensor> empty_like_heads(const std::vector<Tensor>& parts) {
  const auto width = [](const Tensor& part) { return part.size(2) * part.size(3); };
  std::int64_t total = 0;
  for (const Tensor& part : parts) total += width(part);
  const std::int64_t B = parts[0].size(0), S = parts[0].size(1), D = parts[0].size(3);
  const Shape strides = {S * total, total, D, 1};
  const bool are_neighbours = share_storage(parts) && follow_each_other(parts, width) && std::ranges::all_of(parts, [&](const Tensor& part) {
    return part.size(0) == B && part.size(1) == S && part.strides() == strides;
  });
  std::vector<Tensor> out;
  if (!are_neighbours) {
    for (const Tensor& part : parts) out.push_back(Tensor::empty(part.shape(), part.dtype(), part.device()));
    return out;
  }
  const Tensor all = Tensor::empty({B, S, total}, parts[0].dtype(), parts[0].device());
  std::int64_t offset = 0;
  for (const Tensor& part : parts) {
    out.push_back(all.alias(part.shape(), strides, offset));
    offset += width(part);
  }
  return out;
}

}  // namespace heddle
