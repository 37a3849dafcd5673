#include "quant/quantized_base.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"
#include "kernels/runtime/parallel.h"
#include "nn/atomic_file.h"
#include "nn/checkpoint.h"
#include "nn/fingerprint.h"
#include "nn/json_text.h"
#include "nn/posix_file.h"
#include "nn/tensor_files.h"
#include "quant/quant_file.h"
#include "quant/quant_layout.h"
#include "quant/quantize_model.h"

namespace heddle::quant {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const char* const kRecordFile = "base.json";
constexpr int kVersion = 1;  // goes up where the same base and config give other bytes than before

// Adds the fingerprints of the parts of the files with a folder's weights, which all threads find.
void add_weights(nn::Fingerprint& fingerprint, const fs::path& folder) {
  constexpr std::int64_t kPart = std::int64_t{1} << 22;
  std::vector<char> bytes(16 * kPart);
  for (const fs::path& path : nn::TensorFiles::of_model(folder).paths()) {
    const nn::FileDescriptor file = nn::open_for_reading(path);
    const std::int64_t nbytes = nn::file_size(file, path);
    for (std::int64_t at = 0; at < nbytes; at += static_cast<std::int64_t>(bytes.size())) {
      const std::int64_t count = std::min(nbytes - at, static_cast<std::int64_t>(bytes.size()));
      nn::read_exactly(file, path, bytes.data(), count, at);
      std::vector<nn::Fingerprint> parts(static_cast<std::size_t>((count + kPart - 1) / kPart));
      parallel_tasks(static_cast<std::int64_t>(parts.size()), [&](std::int64_t i) {
        parts[static_cast<std::size_t>(i)].add(bytes.data() + i * kPart, static_cast<std::size_t>(std::min(kPart, count - i * kPart)));
      });
      for (const nn::Fingerprint& part : parts) fingerprint.add(part.text());
    }
  }
}

std::string fingerprint_of(const fs::path& folder) {
  nn::Fingerprint out;
  add_weights(out, folder);
  return out.text();
}

// Everything that decides which bytes come out.
std::string key_of(const fs::path& folder, QuantConfig config, DType dtype) {
  nn::Fingerprint out;
  out.add(concat_text("version ", kVersion, ", ", dtype));
  for (const nn::Field& field : fields(config)) out.add(concat_text(field.key, ": ", field.value_text()));
  add_weights(out, folder);
  return out.text();
}

class Kept {
 public:
  Kept(const fs::path& base, const fs::path& folder, const QuantConfig& config, DType dtype)
      : key_(key_of(folder, config, dtype)) {
    folder_ = fs::canonical(base);
    folder_ += concat_text(".", name_of(config.format), "-", key_);
  }

  bool exists() const { return fs::exists(folder_); }
  std::string name() const { return nn::printable_path(folder_); }

  // Fills the model and returns lines on what quantising had cost. Throws heddle::Error, with the model unchanged, for a folder that is not
  // whole, and nn::BadValue for a config that does not fit.
  std::vector<std::string> load(nn::CausalLM& model, std::optional<QuantCompute> compute) const {
    const json record = nn::parse_json<json>(nn::read_file(folder_ / kRecordFile));
    HEDDLE_CHECK(nn::text_at(record, "key") == key_, kRecordFile, " is of another base or config");
    HEDDLE_CHECK(nn::text_at(record, "weights") == fingerprint_of(folder_), nn::kWeightsFile, " is not the file that was written");
    const json cost = nn::member(record, "cost");
    HEDDLE_CHECK(cost.is_array() && std::ranges::all_of(cost, [](const json& line) { return line.is_string(); }), kRecordFile,
                 " has no list of lines on what it cost");
    load_quantized(folder_, model, compute);
    return cost.get<std::vector<std::string>>();
  }

  void save(const nn::CausalLM& model, const std::vector<std::string>& cost) const {
    nn::AtomicFolder out(folder_);
    save_quantized(out.path(), model);
    const json record = {{"key", key_}, {"weights", fingerprint_of(out.path())}, {"cost", cost}};
    nn::write_file(out.path() / kRecordFile, record.dump(2) + "\n");
    out.commit();
  }

 private:
  std::string key_;
  fs::path folder_;
};

// As if the parameters had been loaded in `dtype`.
void round_parameters(const nn::CausalLM& model, DType dtype) {
  const NoGradGuard no_grad;
  for (const auto& [name, tensor] : model.parameters())
    if (tensor.dtype() != dtype) tensor.copy_(cast(cast(tensor, dtype), tensor.dtype()));
}

// Returns lines on what it cost.
std::vector<std::string> quantize_base(const fs::path& folder, const QuantConfig& config, DType dtype, nn::CausalLM& model,
                                       std::optional<QuantCompute> compute) {
  nn::load_weights(folder, model, nn::Dtypes::converted);
  round_parameters(model, dtype);
  const QuantReport report = quantize_model(model, config, compute);
  std::vector<std::string> out = notes(report);
  out.insert(out.begin(), summary(report));
  return out;
}

}  // namespace

std::vector<std::string> load_quantized_base(const fs::path& base, const fs::path& folder, const QuantConfig& config, DType dtype,
                                             nn::CausalLM& model, std::optional<QuantCompute> compute) {
  if (!has_layout(config.spec())) return quantize_base(folder, config, dtype, model, compute);
  const Kept kept(base, folder, config, dtype);
  std::vector<std::string> log;
  if (kept.exists()) {
    try {
      log = kept.load(model, compute);
      log.push_back("quantised weights of an earlier run, from " + kept.name());
      return log;
    } catch (const nn::BadValue&) {
      throw;
    } catch (const Error& error) {
      log = {concat_text(kept.name(), " is made again: ", error.what())};
    }
  }
  const std::vector<std::string> cost = quantize_base(folder, config, dtype, model, compute);
  log.insert(log.end(), cost.begin(), cost.end());
  try {
    kept.save(model, cost);
    log.push_back("quantised weights are kept in " + kept.name());
  } catch (const Error& error) {
    log.push_back(concat_text("quantised weights are not kept: ", error.what()));
  }
  return log;
}

}  // namespace heddle::quant
