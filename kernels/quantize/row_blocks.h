#pragma once

#include "kernels/quantize/quantize.h"

namespace heddle::cuda {

// x as E4M3 codes with a scale for every kFp8Block columns of a row, as fp8_e4m3 with a scale a row has it for those columns.
//   x       as in AmaxArgs, not empty
//   codes   uint8 [rows, columns], dense
//   scales  float32 [ceil(columns / kFp8Block), rows], dense
void quantize_row_blocks(const ConstView& x, const MutView& codes, const MutView& scales, const ExecContext& ctx);

}  // namespace heddle::cuda
