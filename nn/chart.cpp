#include "nn/chart.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/runtime/check.h"

namespace heddle::nn {
namespace {

constexpr double kWidth = 800, kHeight = 480;
constexpr double kLeft = 76, kRight = 768, kTop = 44, kBottom = 424;  // of the plot area
constexpr const char* kInk = "#222222";
constexpr const char* kGrid = "#dddddd";
constexpr const char* kTitleFont = " font-size=\"16\" font-weight=\"bold\"";
constexpr double kCharacter = 7.2;  // a wide guess at a character of 13 px type

// A number without an exponent, in at most `decimals` decimals, whatever the locale.
std::string plain_text(double value, int decimals) {
  char buffer[400];  // the longest double has 309 digits before the point
  char* end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed, decimals).ptr;
  std::string text(buffer, end);
  if (decimals > 0) text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

std::string coordinate(double value) { return plain_text(value, 2); }

// A tick's label: plain where that is short, else with an exponent.
std::string tick_text(double value) {
  const double size = std::abs(value);
  if (size == 0 || (size >= 1e-4 && size < 1e7)) return plain_text(value, 6);
  char buffer[32];
  return std::string(buffer, std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::general, 3).ptr);
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;  // XML has no control characters
    }
  }
  return out;
}

// Multiples of 1, 2 or 5 times a power of ten in [low, high], about `count` of them.
std::vector<double> linear_ticks(double low, double high, int count) {
  const double rough = (high - low) / count;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  const double ratio = rough / power;
  const double step = power * (ratio < 1.5 ? 1 : ratio < 3.5 ? 2 : ratio < 7.5 ? 5 : 10);
  std::vector<double> ticks;
  // The slack keeps a tick that rounding moved just past an end.
  for (double k = std::ceil(low / step - 1e-9); k <= high / step + 1e-9; ++k) ticks.push_back(k * step);
  return ticks;
}

// Powers of ten; with their doubles and fivefolds where that gives few. A range too narrow for both has linear ticks.
std::vector<double> log_ticks(double low, double high) {
  for (const std::vector<double>& factors : {std::vector<double>{1}, std::vector<double>{1, 2, 5}}) {
    std::vector<double> ticks;
    for (double exponent = std::floor(std::log10(low)); exponent <= std::log10(high); ++exponent)
      for (const double factor : factors)
        if (const double tick = factor * std::pow(10.0, exponent); tick >= low && tick <= high) ticks.push_back(tick);
    if (ticks.size() >= 3) return ticks;
  }
  return linear_ticks(low, high, 5);
}

// One axis: data values to pixels.
class Axis {
 public:
  // Maps [low, high] of `values`, widened by the fraction `margin` at both ends, to [first_pixel, last_pixel].
  Axis(const std::vector<double>& values, bool is_log, double margin, double first_pixel, double last_pixel)
      : is_log_(is_log), first_pixel_(first_pixel), last_pixel_(last_pixel) {
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    low_ = scaled(*low);
    high_ = scaled(*high);
    const double pad = high_ > low_ ? margin * (high_ - low_) : std::max(0.1 * std::abs(low_), 0.5);
    low_ -= pad;
    high_ += pad;
  }

  double pixel(double value) const {
    return first_pixel_ + (scaled(value) - low_) / (high_ - low_) * (last_pixel_ - first_pixel_);
  }
  std::vector<double> ticks() const {
    return is_log_ ? log_ticks(std::pow(10.0, low_), std::pow(10.0, high_)) : linear_ticks(low_, high_, 6);
  }

 private:
  double scaled(double value) const { return is_log_ ? std::log10(value) : value; }

  bool is_log_;
  double first_pixel_, last_pixel_;
  double low_ = 0, high_ = 1;
};

bool is_drawable(double x, double y, bool log_y) { return std::isfinite(x) && std::isfinite(y) && (!log_y || y > 0); }

std::string text_element(double x, double y, const std::string& anchor, const std::string& text, const std::string& extra = {}) {
  return "<text x=\"" + coordinate(x) + "\" y=\"" + coordinate(y) + "\" text-anchor=\"" + anchor + "\"" + extra + ">" +
         escaped(text) + "</text>\n";
}

std::string line_element(double x1, double y1, double x2, double y2, const std::string& attributes) {
  return "<line x1=\"" + coordinate(x1) + "\" y1=\"" + coordinate(y1) + "\" x2=\"" + coordinate(x2) + "\" y2=\"" +
         coordinate(y2) + "\" " + attributes + "/>\n";
}

std::string circle_element(double x, double y, const std::string& colour) {
  return "<circle cx=\"" + coordinate(x) + "\" cy=\"" + coordinate(y) + "\" r=\"3.5\" fill=\"" + escaped(colour) + "\"/>\n";
}

// A white page.
std::string opening(double page_width, double page_height) {
  const std::string width = coordinate(page_width), height = coordinate(page_height);
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + width + " " + height + "\" width=\"" + width + "\" height=\"" + height +
         "\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"13\" fill=\"" + kInk + "\">\n<rect width=\"" + width + "\" height=\"" +
         height + "\" fill=\"#ffffff\"/>\n";
}

std::string stroke(const Series& series) {
  const bool is_thin = series.style == SeriesStyle::thin_line;
  return "stroke=\"" + escaped(series.colour) + "\" stroke-width=\"" + (is_thin ? "1" : "2") + "\" stroke-opacity=\"" +
         (is_thin ? "0.4" : "1") + "\" stroke-linecap=\"round\" stroke-linejoin=\"round\" fill=\"none\"";
}

std::string series_elements(const Series& series, const Axis& x_axis, const Axis& y_axis, bool log_y) {
  std::string path, points;
  bool is_open = false;
  for (std::size_t i = 0; i < series.x.size(); ++i) {
    if (!is_drawable(series.x[i], series.y[i], log_y)) {
      is_open = false;
      continue;
    }
    const double x = x_axis.pixel(series.x[i]), y = y_axis.pixel(series.y[i]);
    const std::string at = coordinate(x) + " " + coordinate(y);
    // A line to the first point itself: with round ends, a point between two gaps shows as a dot.
    path += is_open ? "L" + at : "M" + at + "L" + at;
    is_open = true;
    if (series.style == SeriesStyle::line_with_points) points += circle_element(x, y, series.colour);
  }
  return path.empty() ? "" : "<path d=\"" + path + "\" " + stroke(series) + "/>\n" + points;
}

std::string axes_elements(const Chart& chart, const Axis& x_axis, const Axis& y_axis) {
  const std::string grid = std::string("stroke=\"") + kGrid + "\"";
  std::string out;
  for (const double tick : y_axis.ticks()) {
    const double y = y_axis.pixel(tick);
    out += line_element(kLeft, y, kRight, y, grid) + text_element(kLeft - 8, y + 4, "end", tick_text(tick));
  }
  for (const double tick : x_axis.ticks()) {
    const double x = x_axis.pixel(tick);
    out += line_element(x, kTop, x, kBottom, grid) + text_element(x, kBottom + 18, "middle", tick_text(tick));
  }
  const double middle = (kTop + kBottom) / 2;
  const std::string frame = std::string("stroke=\"") + kInk + "\"";
  out += line_element(kLeft, kBottom, kRight, kBottom, frame) + line_element(kLeft, kTop, kLeft, kBottom, frame);
  out += text_element((kLeft + kRight) / 2, kBottom + 42, "middle", chart.x_label);
  out += text_element(20, middle, "middle", chart.y_label, " transform=\"rotate(-90 20 " + coordinate(middle) + ")\"");
  return out;
}

std::string legend_elements(const std::vector<Series>& all) {
  std::vector<Series> listed;
  std::size_t longest = 0;
  for (const Series& series : all) {
    if (series.name.empty() || series.x.empty()) continue;
    listed.push_back(series);
    longest = std::max(longest, series.name.size());
  }
  if (listed.empty()) return {};
  const double width = 52 + kCharacter * static_cast<double>(longest);
  const double left = kRight - 10 - width;
  std::string out = "<rect x=\"" + coordinate(left) + "\" y=\"" + coordinate(kTop + 8) + "\" width=\"" + coordinate(width) +
                    "\" height=\"" + coordinate(10 + 20 * static_cast<double>(listed.size())) +
                    "\" fill=\"#ffffff\" fill-opacity=\"0.85\" stroke=\"" + kGrid + "\"/>\n";
  double y = kTop + 23;
  for (const Series& series : listed) {
    out += line_element(left + 10, y, left + 34, y, stroke(series));
    if (series.style == SeriesStyle::line_with_points) out += circle_element(left + 22, y, series.colour);
    out += text_element(left + 42, y + 4.5, "start", series.name);
    y += 20;
  }
  return out;
}

}  // namespace

std::string to_svg(const Chart& chart) {
  std::vector<double> xs, ys;
  for (const Series& series : chart.series) {
    HEDDLE_CHECK(series.x.size() == series.y.size(), "chart: series \"", series.name, "\" has ", series.x.size(),
                 " x and ", series.y.size(), " y values; it needs as many of both");
    for (std::size_t i = 0; i < series.x.size(); ++i) {
      if (!is_drawable(series.x[i], series.y[i], chart.log_y)) continue;
      xs.push_back(series.x[i]);
      ys.push_back(series.y[i]);
    }
  }
  std::string out = opening(kWidth, kHeight) + text_element((kLeft + kRight) / 2, 28, "middle", chart.title, kTitleFont);
  if (xs.empty()) {
    out += text_element((kLeft + kRight) / 2, (kTop + kBottom) / 2, "middle", "no data");
  } else {
    const Axis x_axis(xs, /*is_log=*/false, /*margin=*/0.0, kLeft, kRight);
    const Axis y_axis(ys, chart.log_y, /*margin=*/0.05, kBottom, kTop);
    out += axes_elements(chart, x_axis, y_axis);
    for (const Series& series : chart.series) out += series_elements(series, x_axis, y_axis, chart.log_y);
    out += legend_elements(chart.series);
  }
  return out + "</svg>\n";
}

std::string to_svg(const BarChart& chart) {
  constexpr double kRow = 20, kBar = 14, kPlotWidth = 460, kValueWidth = 64, kMargin = 16;
  std::size_t longest = 0;
  std::vector<double> values = {0};
  for (const Bar& bar : chart.bars) {
    longest = std::max(longest, bar.label.size());
    if (std::isfinite(bar.value)) values.push_back(bar.value);
  }
  const double left = 2 * kMargin + kCharacter * static_cast<double>(longest), right = left + kPlotWidth;
  const double bottom = kTop + kRow * static_cast<double>(chart.bars.size()), width = right + kValueWidth + kMargin;
  const Axis axis(values, /*is_log=*/false, /*margin=*/0.0, left, right);
  std::string out = opening(width, bottom + 56) + text_element(width / 2, 28, "middle", chart.title, kTitleFont);
  for (const double tick : axis.ticks()) {
    const double x = axis.pixel(tick);
    out += line_element(x, kTop, x, bottom, std::string("stroke=\"") + kGrid + "\"") + text_element(x, bottom + 18, "middle", tick_text(tick));
  }
  double y = kTop + (kRow - kBar) / 2;
  for (const Bar& bar : chart.bars) {
    out += text_element(left - 8, y + kBar - 3, "end", bar.label);
    if (std::isfinite(bar.value)) {
      const double from = axis.pixel(std::min(bar.value, 0.0)), to = axis.pixel(std::max(bar.value, 0.0));
      out += "<rect x=\"" + coordinate(from) + "\" y=\"" + coordinate(y) + "\" width=\"" + coordinate(to - from) + "\" height=\"" +
             coordinate(kBar) + "\" fill=\"#1f77b4\"/>\n" + text_element(to + 6, y + kBar - 3, "start", plain_text(bar.value, 2));
    }
    y += kRow;
  }
  out += line_element(axis.pixel(0), kTop, axis.pixel(0), bottom, std::string("stroke=\"") + kInk + "\"");
  return out + text_element((left + right) / 2, bottom + 42, "middle", chart.x_label) + "</svg>\n";
}

std::vector<double> smoothed(const std::vector<double>& y, std::size_t radius) {
  std::vector<double> out;
  for (std::size_t i = 0; i < y.size(); ++i) {
    const std::size_t reach = std::isfinite(y[i]) ? std::min({radius, i, y.size() - 1 - i}) : 0;
    double sum = 0;
    int count = 0;
    for (std::size_t j = i - reach; j <= i + reach; ++j) {
      if (!std::isfinite(y[j])) continue;
      sum += y[j];
      ++count;
    }
    out.push_back(count > 0 ? sum / count : y[i]);
  }
  return out;
}

Chart loss_chart(const std::string& title, const Curve& train, const Curve& eval) {
  constexpr double kLogRange = 20;  // a wider range hides the lower part of a linear axis
  const std::size_t radius = std::max<std::size_t>(1, train.loss.size() / 40);  // a twentieth of the curve at once
  double low = std::numeric_limits<double>::infinity(), high = 0;
  for (const Curve* curve : {&train, &eval}) {
    for (const double loss : curve->loss) {
      if (!std::isfinite(loss) || loss <= 0) continue;
      low = std::min(low, loss);
      high = std::max(high, loss);
    }
  }
  return {
      .title = title,
      .x_label = "step",
      .y_label = "loss (nats per token)",
      .log_y = high > kLogRange * low,
      .series = {{"training", train.step, train.loss, "#1f77b4", SeriesStyle::thin_line},
                 {"training, smoothed", train.step, smoothed(train.loss, radius), "#1f77b4", SeriesStyle::line},
                 {"evaluation", eval.step, eval.loss, "#d95f02", SeriesStyle::line_with_points}},
  };
}

}  // namespace heddle::nn
