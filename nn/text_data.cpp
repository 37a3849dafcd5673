#include "nn/text_data.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <system_error>
#include <utility>

#include "nn/fingerprint.h"
#include "nn/posix_file.h"
#include "nn/tokenizer.h"

namespace heddle::nn {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> components_of(const std::string& pattern) {
  std::vector<std::string> out;
  for (const fs::path& part : fs::path(pattern)) out.push_back(part.string());
  if (!out.empty() && out.back() == "**") out.push_back("*");
  return out;
}

bool is_searched(const fs::directory_entry& entry) {
  const std::string name = entry.path().filename().string();
  // Links to folders are left out: they can form a cycle.
  return !entry.is_symlink() && entry.is_directory() && !name.starts_with('.') && name != "build" && name != "runs";
}

// Adds the files below `folder` that match components[next..].
void expand(const fs::path& folder, const std::vector<std::string>& components, std::size_t next, std::set<fs::path>& out) {
  if (next == components.size()) {
    if (std::error_code ignored; fs::is_regular_file(folder, ignored)) out.insert(folder.lexically_normal());
    return;
  }
  const std::string& component = components[next];
  if (component.find_first_of("*?[") == std::string::npos) return expand(folder / component, components, next + 1, out);
  if (component == "**") expand(folder, components, next + 1, out);
  if (std::error_code ignored; !fs::is_directory(folder, ignored)) return;
  for (const auto& entry : fs::directory_iterator(folder, fs::directory_options::skip_permission_denied)) {
    if (component == "**") {
      if (is_searched(entry)) expand(entry.path(), components, next, out);
    } else if (fnmatch(component.c_str(), entry.path().filename().c_str(), FNM_PERIOD) == 0) {
      expand(entry.path(), components, next + 1, out);
    }
  }
}

std::string hash_of(const std::vector<std::int32_t>& tokens) {
  Fingerprint out;
  out.add(tokens.data(), tokens.size() * sizeof(tokens[0]));
  return out.text();
}

}  // namespace

std::vector<fs::path> find_files(const std::vector<std::string>& patterns, const fs::path& root) {
  HEDDLE_CHECK(!patterns.empty(), "data: files is empty; give at least one pattern, such as \"**/*.md\"");
  std::set<fs::path> found;
  std::string unmatched;
  for (const std::string& pattern : patterns) {
    std::set<fs::path> matches;
    expand(root, components_of(pattern), 0, matches);
    if (matches.empty()) unmatched.append(unmatched.empty() ? "" : ", ").append(quoted_text(pattern));
    found.merge(matches);
  }
  if (!unmatched.empty()) {
    const std::string where = printable_path(fs::absolute(root).lexically_normal());
    throw BadValue("data.files", "patterns that each match a file in " + where, unmatched);
  }
  return {found.begin(), found.end()};
}

TextCorpus read_text(const std::vector<std::string>& patterns, const fs::path& root) {
  const std::vector<fs::path> paths = find_files(patterns, root);
  std::string text;
  for (const fs::path& path : paths) text += read_file(path);
  return {concat_text(paths.size(), paths.size() == 1 ? " file" : " files"), ByteTokenizer().encode(text)};
}

TextData::TextData(TextCorpus corpus, std::int64_t sequence_length, double validation_fraction, std::uint64_t seed)
    : Dataset(seed), corpus_(std::move(corpus)) {
  const std::int64_t window = sequence_length + 1;
  const auto token_count = static_cast<std::int64_t>(corpus_.tokens.size());
  if (token_count < 4) throw BadValue("data.files", "files of at least 4 bytes in all", std::to_string(token_count));
  if (token_count < 2 * window) {
    throw BadValue("data.sequence_length", concat_text("at most ", token_count / 2 - 1, ", for the ", token_count,
                                                       " tokens of the text to give a training and a held-out window"),
                   std::to_string(sequence_length));
  }
  const std::int64_t windows = token_count / window;
  const std::int64_t held_out = std::llround(validation_fraction * static_cast<double>(windows));
  const std::string split = concat_text("of the ", windows, " windows of ", window, " tokens");
  if (held_out < 1) {
    throw BadValue("data.validation_fraction", "a share that holds out at least one " + split, number_text(validation_fraction));
  }

  std::int64_t start = 0, train_size = 0;
  const auto add_stretch = [&](std::int64_t end) {
    const std::int64_t count = end - start - window + 1;
    if (count <= 0) return;
    stretches_.push_back({start, train_size});
    train_size += count;
  };
  for (std::int64_t i = 0; i < held_out; ++i) {
    const std::int64_t held_out_start = (2 * i + 1) * windows / (2 * held_out) * window;
    add_stretch(held_out_start);
    eval_starts_.push_back(held_out_start);
    start = held_out_start + window;
  }
  add_stretch(token_count);
  if (train_size < 1) {
    throw BadValue("data.validation_fraction", "a share that leaves at least one for training " + split,
                   number_text(validation_fraction));
  }
  set_sizes(train_size, held_out, sequence_length);
}

std::string TextData::describe() const {
  return concat_text("text: ", corpus_.origin, ", ", corpus_.tokens.size(), " tokens with hash ", hash_of(corpus_.tokens), ", ", eval_size(), " held-out windows of ",
                     row_length() + 1, " tokens, ", train_size(), " places to start a training window");
}

std::int64_t TextData::start_of(Split split, std::int64_t index) const {
  if (split == Split::eval) return eval_starts_[static_cast<std::size_t>(index)];
  const auto after = std::upper_bound(stretches_.begin(), stretches_.end(), index,
                                      [](std::int64_t value, const Stretch& stretch) { return value < stretch.before; });
  const Stretch& stretch = *std::prev(after);
  return stretch.start + index - stretch.before;
}

void TextData::write_example(Split split, std::int64_t index, std::span<std::int64_t> ids, std::span<std::int64_t> labels) const {
  const std::int32_t* tokens = corpus_.tokens.data() + start_of(split, index);
  std::copy_n(tokens, ids.size(), ids.begin());
  std::copy_n(tokens + 1, labels.size(), labels.begin());
}

}  // namespace heddle::nn
