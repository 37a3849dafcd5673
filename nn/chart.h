#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace heddle::nn {

enum class SeriesStyle { line, thin_line, line_with_points };

struct Series {
  std::string name;         // in the legend; not listed there if empty or without values
  std::vector<double> x;    // as many as y
  std::vector<double> y;    // a value that is not finite, or not positive on a logarithmic axis, leaves a gap
  std::string colour;       // any SVG colour
  SeriesStyle style = SeriesStyle::line;
};

struct Chart {
  std::string title;
  std::string x_label;
  std::string y_label;
  bool log_y = false;
  std::vector<Series> series;
};

// The chart as an SVG document, on a white background so that it reads the same in light and dark viewers.
// Throws heddle::Error if a series has x and y of different lengths.
std::string to_svg(const Chart& chart);

struct Bar {
  std::string label;
  double value = 0;  // no bar if it is not finite
};

// Horizontal bars from 0, one under the other, each with its label and value.
struct BarChart {
  std::string title;
  std::string x_label;
  std::vector<Bar> bars;
};
std::string to_svg(const BarChart& chart);

// Centred moving average: out[i] is the mean of y[i-r] .. y[i+r], where r is `radius` or, near an end, as far as both
// sides reach; so a straight line stays itself. Values that are not finite are passed through and left out of the means.
std::vector<double> smoothed(const std::vector<double>& y, std::size_t radius);

// Points of a loss curve.
struct Curve {
  std::vector<double> step;
  std::vector<double> loss;
};

// Training loss as a thin line under its smoothed self, evaluation loss as points on a line.
Chart loss_chart(const std::string& title, const Curve& train, const Curve& eval);

}  // namespace heddle::nn
