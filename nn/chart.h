#pragma once

#include <string>
#include <vector>

namespace heddle::nn {

enum class SeriesStyle { line, thin_line, line_with_points };

struct Series {
  std::string name;         // in the legend; empty: not listed
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

// Exponential moving average without the start-up bias: out[i] is the mean of y[0..i] with weights decay^(i-j). Values
// that are not finite are passed through and left out of the mean.
std::vector<double> smoothed(const std::vector<double>& y, double decay);

// Points of a loss curve.
struct Curve {
  std::vector<double> step;
  std::vector<double> loss;
};

// Training loss as a thin line under its smoothed self, evaluation loss as points on a line.
Chart loss_chart(const std::string& title, const Curve& train, const Curve& eval);

}  // namespace heddle::nn
