#include "nn/chart.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/runtime/check.h"

namespace heddle::nn {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++found;
  return found;
}

bool contains(const std::string& text, const std::string& part) { return count(text, part) > 0; }

// Whether every element is closed in order, attributes are quoted and text holds no bare '<' or '&'.
bool is_well_formed(const std::string& xml) {
  std::vector<std::string> open;
  for (std::size_t i = 0; i < xml.size();) {
    if (xml[i] == '&') {
      const std::size_t end = xml.find(';', i);
      if (end == std::string::npos || end - i > 6) return false;
    }
    if (xml[i] != '<') {
      ++i;
      continue;
    }
    const std::size_t end = xml.find('>', i);
    if (end == std::string::npos) return false;
    const std::string tag = xml.substr(i + 1, end - i - 1);
    if (contains(tag, "<") || count(tag, "\"") % 2 != 0) return false;
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return false;
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(tag.substr(0, tag.find(' ')));
    }
    i = end + 1;
  }
  return open.empty();
}

Chart chart_of(std::vector<double> x, std::vector<double> y) {
  return {.title = "title", .x_label = "x", .y_label = "y", .series = {{"name", std::move(x), std::move(y), "#123456"}}};
}

TEST(Chart, IsWellFormedXml) {
  const Curve train{{1, 2, 3, 4}, {5, kNaN, 3, 2}}, eval{{2, 4}, {4, 2.5}};

  EXPECT_TRUE(is_well_formed(to_svg(loss_chart("run", train, eval))));
}

TEST(Chart, TextIsEscaped) {
  Chart chart = chart_of({0, 1}, {0, 1});
  chart.title = "a < b & \"c\" > d\x01";
  chart.series[0].name = "</svg>";

  const std::string svg = to_svg(chart);

  EXPECT_TRUE(is_well_formed(svg));
  EXPECT_TRUE(contains(svg, ">a &lt; b &amp; &quot;c&quot; &gt; d <"));
  EXPECT_TRUE(contains(svg, ">&lt;/svg&gt;<"));
}

TEST(Chart, BackgroundIsWhite) {
  EXPECT_TRUE(contains(to_svg(chart_of({0, 1}, {0, 1})), "<rect width=\"800\" height=\"480\" fill=\"#ffffff\"/>"));
}

// The plot area is x 76..768 and y 424..44. y runs over 0..10 widened by 5 % at both ends: 0 is at 424 - 380 * 0.5 / 11.
TEST(Chart, PointsLandWhereTheAxesSay) {
  EXPECT_TRUE(contains(to_svg(chart_of({0, 50, 100}, {0, 5, 10})), "d=\"M76 406.73L76 406.73L422 234L768 61.27\""));
}

TEST(Chart, TicksAreRoundNumbers) {
  const std::string svg = to_svg(chart_of({0, 1000}, {1.31, 5.62}));

  for (const char* label : {">0<", ">200<", ">400<", ">600<", ">800<", ">1000<", ">2<", ">3<", ">4<", ">5<"})
    EXPECT_TRUE(contains(svg, label)) << label;
  EXPECT_FALSE(contains(svg, ">6<"));
}

TEST(Chart, LogarithmicAxisHasDecades) {
  Chart chart = chart_of({0, 1, 2}, {0.001, 0.1, 10});
  chart.log_y = true;

  const std::string svg = to_svg(chart);

  for (const char* label : {">0.001<", ">0.01<", ">0.1<", ">1<", ">10<"}) EXPECT_TRUE(contains(svg, label)) << label;
  EXPECT_TRUE(contains(svg, " 234L768 "));  // the middle decade is in the middle of the axis
}

TEST(Chart, NonFiniteValuesLeaveAGap) {
  const std::string svg = to_svg(chart_of({0, 1, 2, 3, 4}, {1, 2, kNaN, 2, std::numeric_limits<double>::infinity()}));

  EXPECT_EQ(count(svg.substr(svg.find("d=\"")), "M"), 2);
  EXPECT_FALSE(contains(svg, "nan"));
  EXPECT_FALSE(contains(svg, "inf"));
}

TEST(Chart, NonPositiveValuesLeaveAGapOnALogarithmicAxis) {
  Chart chart = chart_of({0, 1, 2, 3}, {1, 0, -1, 10});
  chart.log_y = true;

  const std::string svg = to_svg(chart);

  EXPECT_EQ(count(svg.substr(svg.find("d=\"")), "M"), 2);
  EXPECT_FALSE(contains(svg, "nan"));
  EXPECT_FALSE(contains(svg, "inf"));
}

TEST(Chart, OneValueIsDrawn) {
  const std::string svg = to_svg(chart_of({5, 5}, {2, 2}));

  EXPECT_TRUE(contains(svg, "d=\"M422 234L422 234L422 234\""));
}

TEST(Chart, NothingToDrawSaysSo) {
  for (const Chart& chart : {Chart{}, chart_of({}, {}), chart_of({1, 2}, {kNaN, kNaN})}) {
    EXPECT_TRUE(contains(to_svg(chart), ">no data<"));
    EXPECT_TRUE(is_well_formed(to_svg(chart)));
  }
}

TEST(Chart, SeriesOfUnequalLengthIsRefused) {
  try {
    to_svg(chart_of({1, 2, 3}, {1}));
    FAIL() << "drew it";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "chart: series \"name\" has 3 x and 1 y values; it needs as many of both");
  }
}

TEST(Chart, LegendListsNamedSeries) {
  Chart chart = chart_of({0, 1}, {0, 1});
  chart.series.push_back({"", {0, 1}, {1, 0}, "#654321"});
  chart.series.push_back({"nothing", {}, {}, "#abcdef"});

  EXPECT_EQ(count(to_svg(chart), "stroke=\"#123456\""), 2);  // the line and its legend
  EXPECT_EQ(count(to_svg(chart), "stroke=\"#654321\""), 1);
  EXPECT_FALSE(contains(to_svg(chart), "nothing"));
}

TEST(Smoothed, IsTheMeanOfBothSides) {
  EXPECT_EQ(smoothed({4, 1, 7, 0, 2}, 1), (std::vector<double>{4, 4, 8 / 3.0, 3, 2}));
}

TEST(Smoothed, StraightLineStaysItself) {
  const std::vector<double> line{1, 2, 3, 4, 5, 6, 7};

  EXPECT_EQ(smoothed(line, 3), line);
}

TEST(Smoothed, LeavesOutValuesThatAreNotFinite) {
  const std::vector<double> out = smoothed({4, 1, kNaN, 3, 2}, 1);

  EXPECT_EQ(out[1], 2.5);
  EXPECT_TRUE(std::isnan(out[2]));
  EXPECT_EQ(out[3], 2.5);
}

TEST(LossChart, WideRangeIsLogarithmic) {
  EXPECT_TRUE(loss_chart("", {{1, 2}, {5.5, 0.001}}, {}).log_y);
  EXPECT_FALSE(loss_chart("", {{1, 2}, {5.5, 1.5}}, {}).log_y);
  EXPECT_FALSE(loss_chart("", {}, {}).log_y);
}

BarChart bars_of(const std::vector<Bar>& bars) { return {.title = "a & b", .x_label = "SQNR (dB)", .bars = bars}; }

TEST(BarChart, HasABarALabelAndAValueForEveryEntry) {
  const std::string svg = to_svg(bars_of({{"q_proj", 20.126}, {"down<proj", 10}}));

  EXPECT_TRUE(is_well_formed(svg));
  EXPECT_EQ(count(svg, "<rect"), 3);  // the page and two bars
  EXPECT_TRUE(contains(svg, ">q_proj<") && contains(svg, ">down&lt;proj<"));
  EXPECT_TRUE(contains(svg, ">20.13<") && contains(svg, ">10<"));
}

TEST(BarChart, LengthsAreProportionalToTheValues) {
  const std::string svg = to_svg(bars_of({{"a", 20}, {"b", 10}}));

  EXPECT_TRUE(contains(svg, "width=\"460\" height=\"14\"") && contains(svg, "width=\"230\" height=\"14\""));
}

TEST(BarChart, ShowsWhatIsNotFiniteWithoutABar) {
  EXPECT_EQ(count(to_svg(bars_of({{"a", kNaN}, {"b", 1}})), "<rect"), 2);
  EXPECT_TRUE(is_well_formed(to_svg(bars_of({}))));
}

}  // namespace
}  // namespace heddle::nn
