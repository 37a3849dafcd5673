#include "kernels/attention/sequence_check.h"
#include "kernels/runtime/fault.cuh"
#include "kernels/runtime/launch.cuh"

namespace heddle::cuda {
namespace {

template <char kSide>
std::string describe_sequence(const Fault& fault) {
  return concat_text("attention: cu_seqlens_", kSide, " gives sequence ", fault.position, " the rows [", fault.value, ", ", fault.limit,
                     ") of ", kSide, "; the first must start at 0, none may be negative, longer than max_seqlen_", kSide,
                     " or past the last of ", fault.other, " rows");
}

__global__ void check_kernel(const std::int32_t* ends, std::int64_t sequences, std::int64_t longest, FaultSlot faults, Fault fault) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (std::int64_t i = first; i < sequences; i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const std::int64_t begin = ends[i], end = ends[i + 1];
    if (begin <= end && end - begin <= longest && end <= fault.other && (i > 0 || begin == 0)) continue;
    fault.position = i, fault.value = begin, fault.limit = end;
    report(faults, fault);
  }
}

void check_ends(const ConstView& cu_seqlens, std::int64_t longest, std::int64_t rows, std::string (*describe)(const Fault&), const ExecContext& ctx) {
  const std::int64_t sequences = cu_seqlens.shape[0] - 1;
  check_kernel<<<grid_for(sequences, kBlock, ctx), kBlock, 0, stream_of(ctx)>>>(
      cu_seqlens.as<std::int32_t>(), sequences, longest, fault_slot(ctx.device.index), Fault{.describe = describe, .other = rows});
  check_launch("attention: sequences");
}

}  // namespace

void check_sequences(const AttentionForwardArgs& args, const ExecContext& ctx) {
  check_ends(args.cu_seqlens_q, args.max_seqlen_q, args.q.shape[1], describe_sequence<'q'>, ctx);
  check_ends(args.cu_seqlens_k, args.max_seqlen_k, args.k.shape[1], describe_sequence<'k'>, ctx);
}

}  // namespace heddle::cuda
