#include "kernels/quantize/quantize.h"

#include <algorithm>
#include <array>

#include "kernels/quantize/scales.h"
#include "kernels/runtime/parallel.h"
#include "kernels/runtime/random.h"

namespace heddle::cpu {
namespace {

constexpr std::int64_t kGrain = 1 << 14;  // elements a thread takes at least

// Rows [first, last) and columns [begin, end) of a matrix.
struct Area {
  std::int64_t first, last, begin, end;
};

// Bits of non-negative floats are in the order of the floats, NaN above all.
template <typename T>
std::uint32_t amax_bits(const ConstView& x, const Area& area) {
  std::uint32_t largest = 0;
  for (std::int64_t r = area.first; r < area.last; ++r) {
    const T* row = x.as<T>() + r * x.strides[0];
    for (std::int64_t c = area.begin; c < area.end; ++c)
      largest = std::max(largest, bits_of(static_cast<float>(row[c])) & 0x7FFFFFFFu);
  }
  return largest;
}

// Writes the codes of one row's columns [begin, end), begin even in FP4, all under one scale.
template <typename F, typename T>
void encode_run(const QuantizeArgs& args, std::int64_t r, std::int64_t begin, std::int64_t end, float scale) {
  const T* row = args.x.as<T>() + r * args.x.strides[0];
  std::uint8_t* out = args.codes.as<std::uint8_t>() + r * args.codes.shape[1];
  std::array<std::uint32_t, 4> words = {};
  std::int64_t drawn = -1;  // the four columns that they are for
  const auto code_at = [&](std::int64_t c) {
    const float scaled = static_cast<float>(row[c]) / scale;
    if (!args.seed) return encode<F>(scaled);
    if (c / 4 != drawn) words = philox(*args.seed, static_cast<std::uint64_t>(drawn = c / 4), static_cast<std::uint64_t>(r));
    return encode_stochastic<F>(scaled, words[static_cast<std::size_t>(c) % 4]);
  };
  if constexpr (F::kBits == 8) {
    for (std::int64_t c = begin; c < end; ++c) out[c] = code_at(c);
  } else {
    for (std::int64_t c = begin; c < end; c += 2) {
      const unsigned high = c + 1 < end ? code_at(c + 1) : 0u;
      out[c / 2] = static_cast<std::uint8_t>(code_at(c) | (high << 4));
    }
  }
}

// Calls body(area, index) for every block of rows x columns; index counts them by rows. A size of 0 is the whole of it.
template <typename Body>
void for_blocks(const Shape& shape, std::int64_t block_rows, std::int64_t block_columns, const Body& body) {
  const std::int64_t height = block_rows > 0 ? block_rows : std::max<std::int64_t>(shape[0], 1);
  const std::int64_t width = block_columns > 0 ? block_columns : std::max<std::int64_t>(shape[1], 1);
  const std::int64_t bands = (shape[0] + height - 1) / height, across = (shape[1] + width - 1) / width;
  parallel_for(bands, std::max<std::int64_t>(kGrain / std::max<std::int64_t>(height * shape[1], 1), 1), [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t i = from; i < to; ++i)
      for (std::int64_t j = 0; j < across; ++j) {
        const Area area = {i * height, std::min((i + 1) * height, shape[0]), j * width, std::min((j + 1) * width, shape[1])};
        body(area, i * across + j);
      }
  });
}

// One float32 scale for the tensor, a row or a block.
template <typename F, typename T>
void quantize_float_scales(const QuantizeArgs& args) {
  float* scales = args.scales.as<float>();
  if (args.spec.needs_amax()) {
    *scales = float_scale(*args.amax.as<float>(), F::kLargest);
    for_blocks(args.x.shape, 1, 0, [&](const Area& area, std::int64_t) { encode_run<F, T>(args, area.first, area.begin, area.end, *scales); });
    return;
  }
  const std::int64_t side = args.spec.grain == ScaleGrain::block ? kFp8Block : 0;
  for_blocks(args.x.shape, side > 0 ? side : 1, side, [&](const Area& area, std::int64_t index) {
    scales[index] = float_scale(std::bit_cast<float>(amax_bits<T>(args.x, area)), F::kLargest);
    for (std::int64_t r = area.first; r < area.last; ++r) encode_run<F, T>(args, r, area.begin, area.end, scales[index]);
  });
}

template <typename T>
void quantize_mxfp4(const QuantizeArgs& args) {
  std::uint8_t* scales = args.scales.as<std::uint8_t>();
  for_blocks(args.x.shape, 1, kMxBlock, [&](const Area& area, std::int64_t index) {
    const ByteScale scale = mxfp4_scale(std::bit_cast<float>(amax_bits<T>(args.x, area)), args.spec.mx_rounding);
    scales[index] = scale.code;
    encode_run<E2M1, T>(args, area.first, area.begin, area.end, scale.value);
  });
}

template <typename T>
void quantize_nvfp4(const QuantizeArgs& args) {
  std::uint8_t* scales = args.scales.as<std::uint8_t>();
  const auto [format, grain, rounding, search, mx] = args.spec;
  const float global = nvfp4_global(*args.amax.as<float>(), search);
  *args.global.as<float>() = global;
  for_blocks(args.x.shape, 1, kNvBlock, [&](const Area& area, std::int64_t index) {
    const T* x = args.x.as<T>() + area.first * args.x.strides[0] + area.begin;
    float block[kNvBlock] = {};
    std::transform(x, x + (area.end - area.begin), block, [](T value) { return static_cast<float>(value); });
    const float largest = std::bit_cast<float>(amax_bits<T>(args.x, area));
    const ByteScale scale = nvfp4_scale(block, largest, global, rounding, search);
    scales[index] = scale.code;
    encode_run<E2M1, T>(args, area.first, area.begin, area.end, scale.value);
  });
}

// What the codes in a row's columns from `column` on are multiplied by, and the column where that ends.
struct RunScale {
  float value;
  std::int64_t end;
};

RunScale scale_at(const QuantView& w, std::int64_t row, std::int64_t column) {
  if (w.spec.format == QuantFormat::mxfp4) {
    const std::int64_t block = column / kMxBlock;
    return {decode_e8m0(w.scales.as<std::uint8_t>()[row * w.scales.shape[1] + block]), (block + 1) * kMxBlock};
  }
  if (w.spec.format == QuantFormat::nvfp4) {
    const std::int64_t block = column / kNvBlock;
    return {decode<E4M3>(w.scales.as<std::uint8_t>()[row * w.scales.shape[1] + block]) / *w.global.as<float>(), (block + 1) * kNvBlock};
  }
  const float* scales = w.scales.as<float>();
  if (w.spec.needs_amax()) return {*scales, w.columns};
  if (w.spec.grain == ScaleGrain::channel) return {scales[row], w.columns};
  const std::int64_t block = column / kFp8Block;
  return {scales[row / kFp8Block * w.scales.shape[1] + block], (block + 1) * kFp8Block};
}

template <typename F, typename T>
void dequantize_typed(const DequantizeArgs& args) {
  const auto& [w, first_row, first_column, out] = args;
  constexpr std::size_t kCodes = std::size_t{1} << F::kBits;
  static constexpr std::array<float, kCodes> kValues = [] {
    std::array<float, kCodes> values{};
    for (std::size_t code = 0; code < kCodes; ++code) values[code] = decode<F>(static_cast<std::uint8_t>(code));
    return values;
  }();
  const std::int64_t count = out.shape[1];
  parallel_for(out.shape[0], std::max<std::int64_t>(kGrain / count, 1), [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t i = from; i < to; ++i) {
      const std::int64_t row = first_row + i;
      const std::uint8_t* codes = w.codes.as<std::uint8_t>() + row * w.codes.shape[1];
      T* to_row = out.as<T>() + i * out.strides[0];
      for (std::int64_t c = first_column; c < first_column + count;) {
        const RunScale scale = scale_at(w, row, c);
        for (const std::int64_t end = std::min(scale.end, first_column + count); c < end; ++c) {
          const unsigned code = F::kBits == 8 ? codes[c] : (codes[c / 2] >> (c % 2 * 4)) & 0xFu;
          to_row[c - first_column] = static_cast<T>(kValues[code] * scale.value);
        }
      }
    }
  });
}

}  // namespace

void amax(const AmaxArgs& args, const ExecContext&) {
  std::array<std::uint32_t, kReductionChunks> parts{};
  const std::int64_t rows = args.x.numel() > 0 ? args.x.shape[0] : 0;
  dispatch_float(args.x.dtype, "amax", [&](auto tag) {
    parallel_for(kReductionChunks, 1, [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t i = from; i < to; ++i) {
        const Area area = {rows * i / kReductionChunks, rows * (i + 1) / kReductionChunks, 0, args.x.shape[1]};
        parts[static_cast<std::size_t>(i)] = amax_bits<typename decltype(tag)::type>(args.x, area);
      }
    });
  });
  std::uint32_t largest = *std::max_element(parts.begin(), parts.end());
  float& out = *args.out.as<float>();
  if (args.write == Write::accumulate) largest = std::max(largest, bits_of(out) & 0x7FFFFFFFu);
  out = std::bit_cast<float>(largest);
}

void quantize(const QuantizeArgs& args, const ExecContext&) {
  dispatch_float(args.x.dtype, "quantize", [&](auto tag) {
    using T = typename decltype(tag)::type;
    switch (args.spec.format) {
      case QuantFormat::fp8_e4m3: return quantize_float_scales<E4M3, T>(args);
      case QuantFormat::fp8_e5m2: return quantize_float_scales<E5M2, T>(args);
      case QuantFormat::fp4: return quantize_float_scales<E2M1, T>(args);
      case QuantFormat::mxfp4: return quantize_mxfp4<T>(args);
      case QuantFormat::nvfp4: return quantize_nvfp4<T>(args);
    }
  });
}

void dequantize(const DequantizeArgs& args, const ExecContext&) {
  dispatch_float(args.out.dtype, "dequantize", [&](auto tag) {
    using T = typename decltype(tag)::type;
    switch (args.w.spec.format) {
      case QuantFormat::fp8_e4m3: return dequantize_typed<E4M3, T>(args);
      case QuantFormat::fp8_e5m2: return dequantize_typed<E5M2, T>(args);
      default: return dequantize_typed<E2M1, T>(args);
    }
  });
}

}  // namespace heddle::cpu
