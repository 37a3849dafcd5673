#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "kernels/runtime/context.h"
#include "kernels/runtime/view.h"

// Matrices of 4 and 8 bits an element. A matrix is cut into blocks that share a scale; an element is stored as the code of
// x / scale and read as its code's value times the scale, in float32, rounded once to the dtype wanted.

namespace heddle {

enum class QuantFormat {
  fp8_e4m3,
  fp8_e5m2,
  fp4,    // E2M1, one scale for the tensor
  mxfp4,  // E2M1, an E8M0 scale for 32 columns of a row. OCP Microscaling 1.0
  nvfp4,  // E2M1, an E4M3 scale for 16 columns of a row, and a float32 scale for the tensor
};
std::string_view name_of(QuantFormat format);  // "fp8_e4m3", ...

// What shares a float32 scale in FP8.
enum class ScaleGrain { tensor, channel /* a row */, block /* 128 rows by 128 columns */ };
// How an NVFP4 block scale amax / 6 becomes E4M3. Rounded up, no element saturates.
enum class ScaleRounding { nearest, up };
// The exponent of an MXFP4 scale: floor(log2(amax)) - 2, by which elements above 6 saturate, or the least one without that.
enum class MxRounding { floor, ceil };
// Which of several NVFP4 block scales is taken, the one with the least squared error: the one for amax, that or the one for 3/2 amax
// (the largest element becomes 6 or 4; Cook et al. 2025), or any of the 126. Of equals the one for amax, then the smallest.
enum class ScaleSearch { none, four_over_six, mse };

struct QuantSpec {
  QuantFormat format = QuantFormat::nvfp4;
  ScaleGrain grain = ScaleGrain::tensor;                 // FP8
  ScaleRounding scale_rounding = ScaleRounding::nearest;  // NVFP4
  ScaleSearch scale_search = ScaleSearch::none;          // NVFP4
  MxRounding mx_rounding = MxRounding::floor;            // MXFP4

  bool is_fp8() const { return format == QuantFormat::fp8_e4m3 || format == QuantFormat::fp8_e5m2; }
  // Whether some scale depends on the largest magnitude of the whole tensor.
  bool needs_amax() const { return is_fp8() ? grain == ScaleGrain::tensor : format != QuantFormat::mxfp4; }
};

// What a quantised [rows, columns] matrix is stored in, all of it dense. Blocks at the edges may be smaller.
//   codes   uint8 [rows, columns] in FP8; [rows, ceil(columns / 2)] in FP4: an even column is the lower half of its byte, and a
//           missing last one is 0
//   scales  one a block: float32 [1], [rows, 1] or [ceil(rows / 128), ceil(columns / 128)] in FP8; float32 [1] in fp4; uint8
//           [rows, ceil(columns / 32)] in mxfp4, [rows, ceil(columns / 16)] in nvfp4
//   global  float32 [1] in nvfp4: the block scales are stored multiplied by it
struct QuantLayout {
  Shape codes, scales;
  DType scale_dtype;
  bool has_global;
};
QuantLayout quant_layout(const QuantSpec& spec, std::int64_t rows, std::int64_t columns);

// out = the largest |x|, NaN if there is one; with Write::accumulate the larger of that and what is there.
//   x    [rows, columns], float32, bfloat16 or float16; rows dense
//   out  float32 [1]
struct AmaxArgs {
  ConstView x;
  MutView out;
  Write write = Write::assign;
};
void amax(const AmaxArgs& args, const ExecContext& ctx);

// Writes codes and scales of x. Every scale is finite and above 0; a block of zeros gets codes 0. x must be finite and at most 2^126,
// which is the caller's to see to: amax tells. The result is the same on every device.
//   x     as for amax
//   amax  float32 [1], if spec.needs_amax(): at least the largest |x|; matrices that are to share scales share it
//   seed  if given, elements are rounded stochastically (encode_stochastic in formats.h), the one at [row, column] by word column % 4
//         of philox(seed, column / 4, row)
struct QuantizeArgs {
  ConstView x;
  QuantSpec spec;
  ConstView amax = {};
  MutView codes;
  MutView scales;
  MutView global = {};
  std::optional<std::uint64_t> seed = {};
};
void quantize(const QuantizeArgs& args, const ExecContext& ctx);

// A quantised [rows, columns] matrix, to be read.
struct QuantView {
  QuantSpec spec;
  std::int64_t rows = 0, columns = 0;
  ConstView codes;
  ConstView scales;
  ConstView global = {};
};

// out = rows from first_row on and columns from first_column (even) on of the matrix.
//   out  [R, C], float32, bfloat16, float16 or, on the CPU, float64; rows dense
struct DequantizeArgs {
  QuantView w;
  std::int64_t first_row = 0, first_column = 0;
  MutView out;
};
void dequantize(const DequantizeArgs& args, const ExecContext& ctx);

// What reading a quantised matrix costs where its source x was. Elements are read as float32, differences are float64.
//   x     [rows, columns], float32, bfloat16 or float16; rows dense
//   sums  float64 [5]: the sums of x^2 and of (x - w)^2, the largest |x| and |x - w|, and how many elements other than 0 read as 0.
//         They are added in an order that the sizes give: the same in every run on a device
struct QuantErrorArgs {
  ConstView x;
  QuantView w;
  MutView sums;
};
void quant_error(const QuantErrorArgs& args, const ExecContext& ctx);

namespace cpu {
void amax(const AmaxArgs& args, const ExecContext& ctx);
void quantize(const QuantizeArgs& args, const ExecContext& ctx);
void dequantize(const DequantizeArgs& args, const ExecContext& ctx);
void quant_error(const QuantErrorArgs& args, const ExecContext& ctx);
}  // namespace cpu
namespace cuda {
void amax(const AmaxArgs& args, const ExecContext& ctx);
void quantize(const QuantizeArgs& args, const ExecContext& ctx);
void dequantize(const DequantizeArgs& args, const ExecContext& ctx);
void quant_error(const QuantErrorArgs& args, const ExecContext& ctx);
}  // namespace cuda

}  // namespace heddle
