#include "kernels/runtime/dtype.h"

#include <array>

namespace heddle {
namespace {

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  std::size_t size;
};

constexpr std::array kDTypes = {
    DTypeInfo{DType::f64, "float64", 8}, DTypeInfo{DType::f32, "float32", 4},
    DTypeInfo{DType::bf16, "bfloat16", 2}, DTypeInfo{DType::f16, "float16", 2},
    DTypeInfo{DType::i64, "int64", 8},   DTypeInfo{DType::i32, "int32", 4},
    DTypeInfo{DType::u8, "uint8", 1},    DTypeInfo{DType::boolean, "bool", 1},
};

const DTypeInfo& info(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)]; }

}  // namespace

std::size_t dtype_size(DType dtype) { return info(dtype).size; }

std::string_view dtype_name(DType dtype) { return info(dtype).name; }

DType dtype_from_name(std::string_view name) {
  for (const DTypeInfo& entry : kDTypes)
    if (entry.name == name) return entry.dtype;
  throw Error(concat_text("dtype: unknown name '", name, "'"));
}

std::ostream& operator<<(std::ostream& out, DType dtype) { return out << dtype_name(dtype); }

}  // namespace heddle
