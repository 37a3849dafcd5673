#include "kernels/embedding/embedding.h"

#include "kernels/runtime/dispatch.h"

namespace heddle {
namespace {

void check_lookup(const ConstView& table, const ConstView& ids, const ConstView& rows) {
  HEDDLE_CHECK(ids.dtype == DType::i64 || ids.dtype == DType::i32, "embedding: ids must be int64 or int32, got ", ids.dtype);
  HEDDLE_CHECK(ids.shape.rank() == 1 && ids.is_contiguous(), "embedding: the kernel needs dense ids of rank 1, got ", ids.shape);
  HEDDLE_CHECK(table.shape.rank() == 2 && rows.shape == Shape({ids.shape[0], table.shape[1]}), "embedding: table ", table.shape,
               " and ids ", ids.shape, " do not fit rows ", rows.shape);
}

}  // namespace

void embedding(const EmbeddingArgs& args, const ExecContext& ctx) {
  check_lookup(args.weight, args.ids, args.out);
  HEDDLE_CHECK(args.weight.dtype == args.out.dtype, "embedding: weight is ", args.weight.dtype, ", output ", args.out.dtype);
  HEDDLE_DISPATCH(ctx, embedding, args);
}

void embedding_backward(const EmbeddingBackwardArgs& args, const ExecContext& ctx) {
  check_lookup(args.dweight, args.ids, args.dout);
  HEDDLE_CHECK(args.dweight.dtype == args.dout.dtype || args.dweight.dtype == DType::f32, "embedding: no gradient ",
               args.dweight.dtype, " from ", args.dout.dtype);
  HEDDLE_DISPATCH(ctx, embedding_backward, args);
}

}  // namespace heddle
