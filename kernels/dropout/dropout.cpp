#include "kernels/dropout/dropout.h"

#include "kernels/runtime/dispatch.h"

namespace heddle {

void dropout(const DropoutArgs& args, const ExecContext& ctx) {
  HEDDLE_CHECK(args.p >= 0.0 && args.p < 1.0, "dropout: p must be in [0, 1), got ", args.p);
  HEDDLE_CHECK(args.out.shape == args.x.shape && args.out.dtype == args.x.dtype, "dropout: output is ", args.out.dtype, " ",
               args.out.shape, ", input ", args.x.dtype, " ", args.x.shape);
  HEDDLE_DISPATCH(ctx, dropout, args);
}

}  // namespace heddle
