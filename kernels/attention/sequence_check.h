#pragma once

#include "kernels/attention/attention.h"

namespace heddle::cuda {

// Reports ends of sequences that break the contract (Note: Sequences of different lengths) as a fault (Note: Faults).
void check_sequences(const AttentionForwardArgs& args, const ExecContext& ctx);

}  // namespace heddle::cuda
