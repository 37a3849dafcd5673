#include "nn/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"
#include "nn/atomic_file.h"
#include "nn/posix_file.h"
#include "nn/safetensors.h"
#include "nn/tensor_files.h"

namespace heddle::nn {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFormatVersion = 1;
constexpr std::string_view kFolderPrefix = "checkpoint-";
const char* const kOptimizerFile = "optimizer.safetensors";
const char* const kStateFile = "trainer_state.json";
const char* const kConfigFile = "config.yaml";
const char* const kMetricsFile = "metrics.jsonl";
const char* const kHeadName = "lm_head.weight";
const char* const kEmbeddingName = "model.embed_tokens.weight";

fs::path folder_of(const fs::path& output_dir, std::int64_t step) {
  return output_dir / concat_text(kFolderPrefix, step);
}

std::string state_text(const TrainerState& state, const std::string& base) {
  json out = {{"format_version", kFormatVersion},
              {"step", state.step},
              {"tokens", state.tokens},
              {"examples", state.examples},
              {"data", state.data},
              {"dropout", {{"seed", state.dropout.seed}, {"offset", state.dropout.offset}}},
              {"best_eval_loss", state.best_eval_loss ? json(*state.best_eval_loss) : json()},
              {"best_step", state.best_step}};
  if (!base.empty()) out["base"] = base;
  return out.dump(2) + "\n";
}

// An integer in [low, high]; JSON also has fractions and what does not fit 64 bits.
std::int64_t integer_in(const json& in, const char* key, std::int64_t low, std::int64_t high, const fs::path& path) {
  const json& value = in.at(key);
  // JSON numbers compare by value, whether they are held as signed, unsigned or floating.
  HEDDLE_CHECK(value.is_number_integer() && value >= json(low) && value <= json(high), printable_path(path), ": ", key,
               " must be an integer in [", low, ", ", high, "], got ", value.dump());
  return value.get<std::int64_t>();
}

std::uint64_t random_number(const json& in, const char* key, const fs::path& path) {
  const json& value = in.at("dropout").at(key);
  HEDDLE_CHECK(value.is_number_unsigned(), printable_path(path), ": dropout.", key, " must be an integer >= 0 of 64 bits, got ",
               value.dump());
  return value.get<std::uint64_t>();
}

// The step in "checkpoint-<step>", if the name has that form.
std::optional<std::int64_t> step_in_name(const std::string& name) {
  if (!name.starts_with(kFolderPrefix)) return std::nullopt;
  const char* begin = name.data() + kFolderPrefix.size();
  const char* end = name.data() + name.size();
  std::int64_t step = 0;
  const auto [stop, error] = std::from_chars(begin, end, step);
  if (error != std::errc() || stop != end || step < 0) return std::nullopt;
  return step;
}

// The state of the checkpoint in a folder. A folder called checkpoint-<step> holds that step: where a checkpoint stands
// among the others is read from names and from states.
TrainerState read_state(const fs::path& folder) {
  const fs::path path = folder / kStateFile;
  try {
    const json in = json::parse(read_file(path));
    const int version = in.at("format_version").get<int>();
    HEDDLE_CHECK(version == kFormatVersion, printable_path(path), ": format_version is ", version,
                 ", this program reads ", kFormatVersion);
    constexpr auto kMost = std::int64_t{1} << 53;  // exact in any JSON reader, and a run can go on counting from there
    const std::int64_t step = integer_in(in, "step", 0, kMost, path);
    TrainerState state{.step = step,
                       .tokens = integer_in(in, "tokens", 0, kMost, path),
                       .examples = integer_in(in, "examples", 0, kMost, path),
                       .data = in.at("data"),
                       .dropout = {random_number(in, "seed", path), random_number(in, "offset", path)},
                       .best_eval_loss = std::nullopt,
                       .best_step = integer_in(in, "best_step", 0, step, path)};
    if (const json& best = in.at("best_eval_loss"); !best.is_null()) state.best_eval_loss = best.get<double>();
    const auto named = step_in_name(fs::absolute(folder).lexically_normal().filename().native());
    HEDDLE_CHECK(!named || *named == step, printable_path(path), ": step is ", step, ", the folder's name says ", *named,
                 "; was it renamed?");
    return state;
  } catch (const json::exception& error) {
    throw Error(concat_text(printable_path(path), ": not a trainer state: ", error.what()));
  }
}

// What AdapterState::base was; "" in a checkpoint without one.
std::string base_of(const fs::path& folder) {
  const json in = json::parse(read_file(folder / kStateFile));
  return in.value("base", "");
}

void write_tensors(const fs::path& path, const std::vector<NamedTensor>& tensors) {
  std::vector<std::pair<std::string, Tensor>> entries;
  for (const NamedTensor& named : tensors) entries.emplace_back(named.name, named.tensor);
  write_safetensors(path, entries, {{"format", "pt"}});
}

// What optimizer.safetensors holds: beside the optimiser's own the model's, as state.NAME, and an adapter's weights.
std::vector<NamedTensor> training_state(const CausalLM& model, const AdamW& optimizer, const std::optional<AdapterState>& adapter) {
  std::vector<NamedTensor> out = optimizer.state();
  for (const NamedTensor& named : model.training_state()) out.push_back({"state." + named.name, named.tensor});
  if (!adapter) return out;
  for (const NamedTensor& named : adapter->tensors) out.push_back({"weight." + named.name, named.tensor});
  return out;
}

// Reads whole files, checks them against the tensors they go to, and only then lets it be copied.
class Restore {
 public:
  // `ignored` may be in the files without a target.
  void match(const TensorFiles& files, const std::vector<NamedTensor>& targets, const std::set<std::string>& ignored = {},
             Dtypes dtypes = Dtypes::equal) {
    std::set<std::string> known = ignored;
    for (const NamedTensor& target : targets) {
      known.insert(target.name);
      if (!files.contains(target.name)) {
        problem(files, target.name, concat_text("missing ", target.name, ", ", target.tensor.dtype(), " ", target.tensor.shape()));
        continue;
      }
      const Tensor source = files.read(target.name);
      const bool has_dtype = source.dtype() == target.tensor.dtype() || (dtypes == Dtypes::converted && is_floating(source.dtype()));
      if (source.shape() != target.tensor.shape() || !has_dtype)
        problem(files, target.name, concat_text(target.name, " is ", source.dtype(), " ", source.shape(), ", expected ",
                                                target.tensor.dtype(), " ", target.tensor.shape()));
      else if (!first_nonfinite({{target.name, source}}).empty())
        problem(files, target.name, concat_text(target.name, " holds NaN or infinity"));
      copies_.push_back({target.tensor, source});
    }
    for (const std::string& name : files.names())
      if (known.count(name) == 0) problem(files, name, concat_text("unexpected ", printable(name)));
  }

  void problem(const TensorFiles& files, const std::string& name, const std::string& text) {
    problems_ += concat_text("\n  ", printable(files.file_name(name)), ": ", text);
  }

  void commit(const fs::path& where) const {
    HEDDLE_CHECK(problems_.empty(), printable_path(where), " does not fit this model; nothing was loaded:", problems_);
    const NoGradGuard no_grad;
    for (const auto& [target, source] : copies_) target.copy_(source);
  }

 private:
  struct Copy {
    Tensor target;
    Tensor source;
  };

  std::vector<Copy> copies_;
  std::string problems_;
};

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(a.view().data, b.view().data, static_cast<std::size_t>(a.nbytes())) == 0;
}

void match_weights(Restore& restore, const fs::path& folder, const CausalLM& model, Dtypes dtypes = Dtypes::equal) {
  const TensorFiles files = TensorFiles::of_model(folder);
  const bool is_tied = model.config().tied();
  restore.match(files, model.parameters(), is_tied ? std::set<std::string>{kHeadName} : std::set<std::string>{}, dtypes);
  if (is_tied && files.contains(kHeadName) && files.contains(kEmbeddingName) &&
      !same_bytes(files.read(kHeadName), files.read(kEmbeddingName)))
    restore.problem(files, kHeadName, concat_text(kHeadName, " differs from ", kEmbeddingName, ", but the config ties them"));
}

bool holds_adapter(const fs::path& folder) { return is_present(folder / kAdapterFile) && !has_weights(folder); }

// Whether a folder has a file named as those of split weights are.
bool holds_shards(const fs::path& folder) {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().native();
    if (name.starts_with("model-") && name.ends_with(".safetensors")) return true;
  }
  return false;
}

// Both throw if a file is missing or damaged.
void check_weights(const fs::path& folder) {
  if (holds_adapter(folder)) SafetensorsFile(folder / kAdapterFile);
  else TensorFiles::of_model(folder);
  HEDDLE_CHECK(fs::is_regular_file(folder / kConfigFile), printable_path(folder), ": ", kConfigFile, " is missing");
}

Checkpoint check_folder(const fs::path& folder) {
  check_weights(folder);
  const SafetensorsFile header(folder / kOptimizerFile);
  return {folder, read_state(folder)};
}

}  // namespace

fs::path save_checkpoint(const fs::path& output_dir, const CausalLM& model, const AdamW& optimizer, const TrainerState& state,
                         const std::string& config_yaml, const std::optional<AdapterState>& adapter) {
  const fs::path target = folder_of(output_dir, state.step);
  const std::vector<NamedTensor> weights = adapter ? std::vector<NamedTensor>() : model.parameters();
  const std::vector<NamedTensor> moments = training_state(model, optimizer, adapter);
  for (const auto& tensors : {weights, moments}) {
    const std::string bad = first_nonfinite(tensors);
    HEDDLE_CHECK(bad.empty(), printable_path(target), ": not saved, ", bad, " holds NaN or infinity");
  }
  AtomicFolder folder(target);
  if (adapter) adapter->write_files(folder.path());  // first: it replaces the folder
  else write_tensors(folder.path() / kWeightsFile, weights);
  write_tensors(folder.path() / kOptimizerFile, moments);
  write_file(folder.path() / kStateFile, state_text(state, adapter ? adapter->base : ""));
  write_file(folder.path() / kConfigFile, config_yaml);
  folder.commit();
  return target;
}

TrainerState load_checkpoint(const fs::path& folder, const CausalLM& model, const AdamW& optimizer,
                             const std::optional<AdapterState>& adapter) {
  const TrainerState state = read_state(folder);
  HEDDLE_CHECK(holds_adapter(folder) == adapter.has_value(), printable_path(folder), " holds ",
               adapter ? "a whole model, and this run trains an adapter" : "an adapter, and this run trains a whole model");
  if (adapter)
    HEDDLE_CHECK(base_of(folder) == adapter->base, printable_path(folder), " was trained on another base than this one; restore it");
  Restore restore;
  if (!adapter) match_weights(restore, folder, model);
  restore.match(TensorFiles(folder / kOptimizerFile), training_state(model, optimizer, adapter));
  restore.commit(folder);
  return state;
}

void load_weights(const fs::path& folder, const CausalLM& model, Dtypes dtypes) {
  Restore restore;
  match_weights(restore, folder, model, dtypes);
  restore.commit(folder);
}

void save_weights(const fs::path& folder, const CausalLM& model, DType dtype) {
  std::vector<NamedTensor> weights = model.parameters();
  for (NamedTensor& weight : weights) weight.tensor = cast(weight.tensor.detach(), dtype);
  const std::string bad = first_nonfinite(weights);
  HEDDLE_CHECK(bad.empty(), printable_path(folder), ": not saved, ", bad, " holds NaN or infinity");
  write_tensors(folder / kWeightsFile, weights);
}

std::vector<Checkpoint> find_checkpoints(const fs::path& output_dir, std::ostream* warnings) {
  std::vector<Checkpoint> out;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(output_dir, error)) {
    if (!step_in_name(entry.path().filename().native())) continue;
    try {
      out.push_back(check_folder(entry.path()));
    } catch (const Error& damage) {
      if (warnings != nullptr) *warnings << "ignoring " << printable_path(entry.path()) << ": " << damage.what() << '\n';
    }
  }
  std::sort(out.begin(), out.end(), [](const Checkpoint& a, const Checkpoint& b) { return a.state.step < b.state.step; });
  return out;
}

std::optional<Checkpoint> find_last_checkpoint(const fs::path& output_dir, std::ostream* warnings) {
  const std::vector<Checkpoint> all = find_checkpoints(output_dir, warnings);
  return all.empty() ? std::nullopt : std::optional(all.back());
}

std::optional<Checkpoint> find_best_checkpoint(const fs::path& output_dir) {
  const std::vector<Checkpoint> all = find_checkpoints(output_dir);
  if (all.empty()) return std::nullopt;
  const TrainerState& last = all.back().state;
  for (const Checkpoint& checkpoint : all)
    if (last.best_eval_loss && checkpoint.state.step == last.best_step) return checkpoint;
  return all.back();
}

Checkpoint open_checkpoint(const fs::path& path, Pick pick) {
  HEDDLE_CHECK(is_present(path) && fs::is_directory(path), printable_path(path), " is not a folder; give a checkpoint or the output folder of a run");
  if (is_present(path / kStateFile) || has_weights(path)) return check_folder(path);
  std::ostringstream damage;
  const auto last = find_last_checkpoint(path, &damage);
  HEDDLE_CHECK(last, printable_path(path), " holds no complete checkpoint; give one, or the output folder of a run",
               damage.view().empty() ? "" : "\n", damage.view());
  return pick == Pick::best ? *find_best_checkpoint(path) : *last;
}

fs::path open_weights(const fs::path& path) {
  const bool is_run = !is_present(path / kStateFile) && !has_weights(path) && !holds_adapter(path);
  HEDDLE_CHECK(!is_run || !holds_shards(path), printable_path(path), " has weights in several files and no ", kWeightsIndex,
               "; add the one they came with");
  const fs::path folder = is_run ? open_checkpoint(path, Pick::best).folder : path;
  HEDDLE_CHECK(!holds_adapter(folder), printable_path(folder), " holds an adapter and not the model it was trained on; give that one");
  check_weights(folder);
  return folder;
}

fs::path open_adapter(const fs::path& path) {
  HEDDLE_CHECK(is_present(path / kAdapterFile) || !is_present(path / kAdapterConfigFile), printable_path(path), " has ", kAdapterConfigFile,
               " and no ", kAdapterFile, "; save the adapter in that form");
  const fs::path folder = is_present(path / kAdapterFile) ? path : open_checkpoint(path, Pick::best).folder;
  HEDDLE_CHECK(is_present(folder / kAdapterFile), printable_path(folder), " holds a model and not an adapter");
  return folder;
}

std::optional<fs::path> set_aside(const fs::path& output_dir, std::int64_t step) {
  std::vector<fs::path> moving;
  for (const fs::directory_entry& entry : fs::directory_iterator(output_dir))
    if (const auto found = step_in_name(entry.path().filename().native()); found && *found > step) moving.push_back(entry.path());
  if (step < 0)
    for (const char* name : {kConfigFile, kMetricsFile, "loss.svg", "sample.txt"})
      if (fs::exists(output_dir / name)) moving.push_back(output_dir / name);
  if (moving.empty()) return std::nullopt;

  int number = 1;
  while (fs::exists(output_dir / concat_text("old-", number))) ++number;
  const fs::path aside = output_dir / concat_text("old-", number);
  fs::create_directory(aside);
  if (step >= 0 && fs::exists(output_dir / kMetricsFile)) fs::copy_file(output_dir / kMetricsFile, aside / kMetricsFile);
  for (const fs::path& path : moving) fs::rename(path, aside / path.filename());
  return aside;
}

void prune_checkpoints(const fs::path& output_dir, std::int64_t limit) {
  const std::vector<Checkpoint> all = find_checkpoints(output_dir);
  if (all.empty()) return;
  const std::int64_t last = all.back().state.step, best = all.back().state.best_step;
  auto excess = static_cast<std::int64_t>(all.size()) - limit;
  for (const Checkpoint& checkpoint : all) {
    if (excess <= 0) return;
    if (checkpoint.state.step == last || checkpoint.state.step == best) continue;
    remove_folder(checkpoint.folder);
    excess -= 1;
  }
}

}  // namespace heddle::nn
