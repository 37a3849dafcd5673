#include "nn/metrics_log.h"

#include <cerrno>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "nn/atomic_file.h"
#include "nn/posix_file.h"

namespace heddle::nn {
namespace {

using json = nlohmann::ordered_json;  // keys in the order in which they were put

// The lines of a file that are whole; a kill can leave half a line at the end.
std::vector<json> read_lines(const std::filesystem::path& path) {
  std::vector<json> out;
  std::istringstream in(std::filesystem::exists(path) ? read_file(path) : std::string());
  for (std::string line; std::getline(in, line);) {
    json object = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (object.is_object() && object.contains("step") && object["step"].is_number_integer()) out.push_back(std::move(object));
  }
  return out;
}

double number_or_nan(const json& value) {
  return value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

MetricsLog::MetricsLog(std::filesystem::path path, std::int64_t step) : path_(std::move(path)) {
  std::string kept;
  for (const json& object : read_lines(path_))
    if (object["step"].get<std::int64_t>() <= step) kept += object.dump() + "\n";
  write_file(path_, kept);
}

void MetricsLog::write(const StepMetrics& metrics) const {
  append(json{{"step", metrics.step},
              {"loss", metrics.loss},
              {"learning_rate", metrics.learning_rate},
              {"grad_norm", metrics.grad_norm},
              {"tokens", metrics.tokens},
              {"tokens_per_second", metrics.tokens_per_second},
              {"step_ms", metrics.step_ms}}
             .dump());
}

void MetricsLog::write(std::int64_t step, const EvalResult& result) const {
  json object{{"step", step}, {"eval_loss", result.loss}};
  if (result.exact_match) object["eval_exact_match"] = *result.exact_match;
  append(object.dump());
}

MetricsLog::Curves MetricsLog::curves() const {
  Curves out;
  for (const json& object : read_lines(path_)) {
    const bool is_eval = object.contains("eval_loss");
    Curve& curve = is_eval ? out.eval : out.train;
    curve.step.push_back(object["step"].get<double>());
    curve.loss.push_back(number_or_nan(object.value(is_eval ? "eval_loss" : "loss", json())));
  }
  return out;
}

void MetricsLog::append(const std::string& line) const {
  std::ofstream out(path_, std::ios::app);
  out << line << '\n' << std::flush;
  if (!out) throw_file_error("cannot append to", path_, errno);
}

}  // namespace heddle::nn
