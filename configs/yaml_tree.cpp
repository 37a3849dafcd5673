#include "configs/yaml_tree.h"

#include <yaml-cpp/depthguard.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <sstream>
#include <utility>

#include "kernels/runtime/check.h"

namespace heddle::config {
namespace {

using Kind = YamlValue::Kind;

Place place_of(const YAML::Mark& mark) { return {mark.line + 1, mark.column + 1}; }

// Builds the tree from parser events rather than from YAML::Node: nodes hide duplicate keys and expand aliases.
class TreeBuilder final : public YAML::EventHandler {
 public:
  YamlValue take_root() { return std::move(root_); }
  Place last_place() const { return last_place_; }  // of the last scalar or finished collection

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (started_) throw YamlSyntaxError{place_of(mark), "one document", "a second one"};
    started_ = true;
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override { add(make(mark, Kind::null)); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { add(make(mark, Kind::alias)); }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t, const std::string& text) override {
    if (tag != "?" && tag != "!") return add(make(mark, Kind::tagged, tag));
    add(make(mark, tag == "?" ? Kind::plain : Kind::quoted, text));
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    open_.push_back({make(mark, Kind::list)});
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    open_.push_back({make(mark, Kind::map)});
  }
  void OnMapEnd() override { close(); }

 private:
  static YamlValue make(const YAML::Mark& mark, Kind kind, std::string text = {}) {
    return {kind, std::move(text), place_of(mark), {}, {}};
  }

  void add(YamlValue value) {
    last_place_ = value.place;
    if (open_.empty()) {
      root_ = std::move(value);
      return;
    }
    YamlValue& parent = open_.back();
    const bool is_key = parent.kind == Kind::map && parent.keys.size() == parent.items.size();
    if (value.kind == Kind::null && parent.kind == Kind::map && !is_key) {
      // The parser puts an empty value where the text after it starts.
      value.place = parent.keys.back().place;
    }
    (is_key ? parent.keys : parent.items).push_back(std::move(value));
  }

  void close() {
    YamlValue done = std::move(open_.back());
    open_.pop_back();
    add(std::move(done));
  }

  std::vector<YamlValue> open_;  // lists and maps not yet closed, outermost first
  YamlValue root_;
  Place last_place_;
  bool started_ = false;
};

// Control characters would end or change the text unseen; a tab before the first character of a line is refused because
// the parser takes some for text and some for an error that does not mention the tab.
void check_characters(std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  Place place;
  bool indentation = true;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\t' && indentation) throw YamlSyntaxError{place, "spaces as indentation", "a tab"};
    if (byte < 0x20 && c != '\t' && c != '\n' && c != '\r') {
      const std::string code{kHex[byte >> 4], kHex[byte & 15]};
      throw YamlSyntaxError{place, "text", "the control character 0x" + code};
    }
    indentation = c == '\n' || (indentation && c == ' ');
    place = c == '\n' ? Place{place.line + 1, 1} : Place{place.line, place.column + 1};
  }
}

void parse(const std::string& text, TreeBuilder& builder) {
  std::istringstream stream(text);
  try {
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const YAML::DeepRecursion& error) {
    throw YamlSyntaxError{place_of(error.mark), "a few levels of nesting", concat_text(error.depth(), " and more")};
  } catch (const YAML::Exception& error) {
    if (error.msg == YAML::ErrorMsg::EOF_IN_SCALAR)
      throw YamlSyntaxError{builder.last_place(), "a closing quote after this", "the end of the text"};
    throw YamlSyntaxError{place_of(error.mark), "valid YAML", "a syntax error (" + error.msg + ")"};
  }
}

}  // namespace

YamlValue parse_yaml(std::string_view text) {
  check_characters(text);
  TreeBuilder builder, strict;
  parse(std::string(text), builder);
  // The parser lets a line end at the end of the text close a quote, but not a comment without one.
  parse(std::string(text) + "\n#", strict);
  return builder.take_root();
}

}  // namespace heddle::config
