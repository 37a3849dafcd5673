#include "kernels/gemm/plan_cuda.h"

#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "kernels/runtime/allocator.h"
#include "kernels/runtime/cuda_check.h"

#define HEDDLE_CUBLAS_CHECK(call)                                                                                        \
  do {                                                                                                                   \
    const cublasStatus_t heddle_status = (call);                                                                         \
    HEDDLE_CHECK(heddle_status == CUBLAS_STATUS_SUCCESS, "cublas: ", #call, ": ", cublasLtGetStatusString(heddle_status)); \
  } while (false)

namespace heddle::cuda {
namespace {

constexpr std::int64_t kWorkspaceBytes = std::int64_t{32} << 20;  // what the library's own advice asks for on Hopper

// An owned cuBLASLt description.
template <typename Handle, cublasStatus_t (*destroy)(Handle)>
class Owned {
 public:
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (handle_ != nullptr) destroy(handle_);
  }
  Handle* out() { return &handle_; }
  Handle get() const { return handle_; }

 private:
  Handle handle_ = nullptr;
};

using MatmulDesc = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using LayoutDesc = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::f64: return CUDA_R_64F;
    case DType::f32: return CUDA_R_32F;
    case DType::bf16: return CUDA_R_16BF;
    case DType::f16: return CUDA_R_16F;
    default: throw Error(concat_text("gemm: needs floating-point operands, got ", dtype, "; cast them first"));
  }
}

cudaDataType_t data_type(Fp8Type type) { return type == Fp8Type::e5m2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3; }

std::pair<cublasLtMatmulMatrixScale_t, cublasLtMatmulMatrixScale_t> scale_modes(Fp8Scales scales) {
  switch (scales) {
    case Fp8Scales::row: return {CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F};
    case Fp8Scales::block: return {CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F};
    default: return {CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F};
  }
}

template <typename Value>
void set(const MatmulDesc& desc, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  HEDDLE_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc.get(), attribute, &value, sizeof(value)));
}

template <typename Value>
void set(const LayoutDesc& layout, cublasLtMatrixLayoutAttribute_t attribute, const Value& value) {
  HEDDLE_CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout.get(), attribute, &value, sizeof(value)));
}

template <typename Value>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, const Value& value) {
  HEDDLE_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)));
}

cublasLtEpilogue_t epilogue_of(const GemmKey& key) {
  const bool has_bias = key.has_bias != 0;
  switch (key.epilogue) {
    case Epilogue::none: return has_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    case Epilogue::gelu: return has_bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    case Epilogue::dgelu: return CUBLASLT_EPILOGUE_DGELU;
  }
  return CUBLASLT_EPILOGUE_DEFAULT;
}

struct Plan {
  MatmulDesc matmul;
  LayoutDesc a, b, d;
  cublasLtMatmulAlgo_t algorithm;

  Plan(const GemmKey& key, const GemmPointers& pointers, cublasLtHandle_t handle) {
    const auto in = static_cast<DType>(key.in), out = static_cast<DType>(key.out);
    const bool is_double = in == DType::f64;
    const cublasComputeType_t compute =
        is_double ? CUBLAS_COMPUTE_64F : (in == DType::f32 && key.allows_tf32 != 0 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F);
    HEDDLE_CUBLAS_CHECK(cublasLtMatmulDescCreate(matmul.out(), compute, is_double ? CUDA_R_64F : CUDA_R_32F));
    set(matmul, CUBLASLT_MATMUL_DESC_TRANSA, key.a.is_transposed != 0 ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(matmul, CUBLASLT_MATMUL_DESC_TRANSB, key.b.is_transposed != 0 ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(matmul, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(key));
    if (key.epilogue != Epilogue::none) set(matmul, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.d.leading);
    const bool is_fp8 = key.fp8 != Fp8Scales::none;
    if (is_fp8) {
      set(matmul, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<std::int8_t>(key.is_precise == 0));
      const auto [a_mode, b_mode] = scale_modes(key.fp8);
      set(matmul, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, a_mode);
      set(matmul, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, b_mode);
      set_scales(pointers);
    }
    describe(a, key.a, is_fp8 ? data_type(key.a_type) : data_type(in), key.batches);
    describe(b, key.b, is_fp8 ? data_type(key.b_type) : data_type(in), key.batches);
    describe(d, key.d, data_type(out), key.batches);
    ask(key, handle);
  }

  void set_scales(const GemmPointers& pointers) const {
    set(matmul, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, pointers.a_scales);
    set(matmul, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, pointers.b_scales);
  }

 private:
  static void describe(LayoutDesc& layout, const MatrixLayout& matrix, cudaDataType_t type, std::int64_t batches) {
    HEDDLE_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(layout.out(), type, static_cast<std::uint64_t>(matrix.rows),
                                                   static_cast<std::uint64_t>(matrix.columns), matrix.leading));
    set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<std::int32_t>(batches));
    set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, matrix.batch_stride);
  }

  void ask(const GemmKey& key, cublasLtHandle_t handle) {
    Preference preference;
    HEDDLE_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(preference.out()));
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kWorkspaceBytes));
    // A split sum is added up in the workspace, in the compute type: the same bits in every run, and one rounding.
    set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<std::uint32_t>(key.a.alignment));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<std::uint32_t>(key.b.alignment));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<std::uint32_t>(key.d.alignment));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<std::uint32_t>(key.d.alignment));
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, matmul.get(), a.get(), b.get(), d.get(), d.get(), preference.get(), 1, &result, &found);
    HEDDLE_CHECK(status == CUBLAS_STATUS_SUCCESS && found == 1, "gemm: cuBLASLt has no algorithm for ", static_cast<DType>(key.in), " [",
                 key.d.columns, ", ", key.d.rows, "] products over ", key.a.is_transposed != 0 ? key.a.rows : key.a.columns, " into ",
                 static_cast<DType>(key.out), " (", cublasLtGetStatusString(status), ")");
    algorithm = result.algo;
  }
};

struct KeyHash {
  std::size_t operator()(const GemmKey& key) const {
    return std::hash<std::string_view>{}({reinterpret_cast<const char*>(&key), sizeof(key)});
  }
};
struct KeyEqual {
  bool operator()(const GemmKey& x, const GemmKey& y) const { return std::memcmp(&x, &y, sizeof(x)) == 0; }
};

// What one stream needs; every device has one stream.
struct Library {
  std::mutex mutex;
  cublasLtHandle_t handle = nullptr;
  Buffer workspace;
  std::unordered_map<GemmKey, std::unique_ptr<Plan>, KeyHash, KeyEqual> plans;
};

// Never destroyed: at the end of the process the driver may be gone before it.
Library& library(int index) {
  static std::mutex mutex;
  static auto& libraries = *new std::unordered_map<int, Library>;
  const std::lock_guard lock(mutex);
  Library& found = libraries[index];
  if (found.handle == nullptr) {
    HEDDLE_CUBLAS_CHECK(cublasLtCreate(&found.handle));
    found.workspace = Buffer(kWorkspaceBytes, {DeviceType::cuda, index});
  }
  return found;
}

}  // namespace

void run_gemm(const GemmKey& key, const GemmPointers& pointers, const ExecContext& ctx) {
  Library& lt = library(ctx.device.index);
  const std::lock_guard lock(lt.mutex);
  std::unique_ptr<Plan>& slot = lt.plans[key];
  if (slot == nullptr) slot = std::make_unique<Plan>(key, pointers, lt.handle);
  const Plan& plan = *slot;
  if (key.has_bias != 0) set(plan.matmul, CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointers.bias);
  if (key.epilogue != Epilogue::none) set(plan.matmul, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, pointers.aux);
  if (key.fp8 != Fp8Scales::none) plan.set_scales(pointers);
  const bool accumulates = key.accumulates != 0;
  const float alpha = static_cast<float>(pointers.scale), beta = accumulates ? 1.0f : 0.0f;
  const double wide_alpha = pointers.scale, wide_beta = accumulates ? 1.0 : 0.0;
  const bool is_double = static_cast<DType>(key.in) == DType::f64;
  const void* alpha_pointer = is_double ? static_cast<const void*>(&wide_alpha) : &alpha;
  const void* beta_pointer = is_double ? static_cast<const void*>(&wide_beta) : &beta;
  HEDDLE_CUBLAS_CHECK(cublasLtMatmul(lt.handle, plan.matmul.get(), alpha_pointer, pointers.a, plan.a.get(), pointers.b, plan.b.get(),
                                     beta_pointer, pointers.d, plan.d.get(), pointers.d, plan.d.get(), &plan.algorithm, lt.workspace.data(), kWorkspaceBytes,
                                     static_cast<cudaStream_t>(ctx.stream)));
}

}  // namespace heddle::cuda
